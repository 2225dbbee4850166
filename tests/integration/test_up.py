"""`moongate up` in a terminal: its panel, and that nothing is left however it ends."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import MOONGATE, free_port, until
from terminals import Terminal, processes_of, terminal

from moongate.local_stack import EXAMPLE
from moongate.simulator.server import BUNDLED_TOKENIZER

pytestmark = pytest.mark.timeout(90)

HINT = "No request yet"
TOP = "\N{BOX DRAWINGS LIGHT ARC DOWN AND RIGHT}\N{BOX DRAWINGS LIGHT HORIZONTAL} moongate"


@pytest.fixture
def up() -> Iterator[tuple[Terminal, str]]:
    """Return a stack in a terminal, up and without a request, and its address."""
    port = free_port()
    with terminal([*MOONGATE, "up", "--port", str(port)], {}) as shown:
        shown.wait_for(lambda text: HINT in text)
        yield shown, f"http://127.0.0.1:{port}"


def ask(url: str) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": EXAMPLE}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30, trust_env=False)
    assert answer.status_code == 200


def until_nothing_is_left(session: int, timeout_s: float = 15.0) -> None:
    until(lambda: not processes_of(session), timeout_s, lambda: processes_of(session))


def test_the_panel_is_drawn_in_place_and_tells_what_goes_on(up: tuple[Terminal, str]) -> None:
    shown, url = up
    before = shown.text
    assert f"{url}/ui" in before
    assert "curl -i" in before
    assert before.count(TOP) == 1
    ask(url)
    ask(url)
    after = shown.wait_for(lambda text: "requests 2 (0 under way)" in text)
    assert HINT not in after
    assert "which holds the prefix, reuses" in after
    httpx.post(f"{url}/admin/instances/engine-b/drain", trust_env=False)
    after = shown.wait_for(lambda text: "draining" in text)
    shown.read(1.5)
    assert after.count(TOP) == shown.text.count(TOP) == 1, "drawn anew below, not in place"
    assert "Traceback" not in after


def test_ctrl_c_leaves_nothing_running_and_the_last_picture_whole(up: tuple[Terminal, str]) -> None:
    shown, url = up
    ask(url)
    shown.wait_for(lambda text: "requests 1" in text)
    shown.press(b"\x03")
    assert shown.wait() == 0
    text = shown.text
    assert text.rstrip().endswith("All of it has stopped.")
    assert text.count(TOP) == 1
    assert not shown.screen.cursor.hidden
    until_nothing_is_left(shown.process.pid)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_sigterm_leaves_nothing_running(up: tuple[Terminal, str]) -> None:
    shown, _ = up
    shown.process.terminate()
    assert shown.wait() == 0
    assert not shown.screen.cursor.hidden
    until_nothing_is_left(shown.process.pid)


def test_a_closed_terminal_ends_all_of_it(up: tuple[Terminal, str]) -> None:
    shown, _ = up
    shown.close()
    shown.process.wait(15)
    until_nothing_is_left(shown.process.pid)


def test_an_open_dashboard_does_not_keep_it(up: tuple[Terminal, str]) -> None:
    shown, url = up
    with httpx.stream("GET", f"{url}/admin/live", timeout=30, trust_env=False) as answer:
        next(answer.iter_lines())
        began = time.monotonic()
        shown.press(b"\x03")
        assert shown.wait() == 0
        assert time.monotonic() - began < 4.0
    until_nothing_is_left(shown.process.pid)


# --- engines that are processes of their own --------------------------------------------------------

STUB = """#!/bin/sh
# In place of the engine environment's python: a simulated engine, and a process beside it, as vLLM has.
sleep 300 &
while [ $# -gt 0 ]; do
  [ "$1" = --port ] && port="$2"
  shift
done
{wait}
exec {python} -m moongate.cli sim-engine --port "$port" --model stub
"""


def make_stub(folder: Path, wait: str = "") -> str:
    """Return the address of an interpreter in whose place an engine runs; `wait`: a command before it."""
    python = folder / ".venv-engine" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB.format(python=sys.executable, wait=wait))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python)


RUN = (
    "import sys; from moongate import local_stack as s; sys.exit(s.run(s.StackOptions(engines=2, "
    "engine='vllm', port=int(sys.argv[1]), model=sys.argv[2], python=sys.argv[3])))"
)


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm", "closed", "ctrl-c while starting",
                                 "sigterm while starting", "closed while starting"])  # fmt: skip
def test_engines_of_their_own_end_with_it(tmp_path: Path, how: str) -> None:
    is_starting = how.endswith("starting")
    stub = make_stub(tmp_path, "sleep 300" if is_starting else "")
    words = [sys.executable, "-c", RUN, str(free_port()), str(BUNDLED_TOKENIZER), stub]
    with terminal(words, {}) as shown:
        session = shown.process.pid
        if is_starting:
            shown.wait_for(lambda text: re.search(r"starting engine-a, engine-b: [1-9]", text))
        else:
            shown.wait_for(lambda text: HINT in text, 40.0)
        assert len([line for line in processes_of(session).values() if "sleep 300" in line]) >= 2
        if how.startswith("ctrl-c"):
            shown.press(b"\x03")
        elif how.startswith("sigterm"):
            os.kill(session, signal.SIGTERM)
        else:
            shown.close()
        if not how.startswith("closed"):
            shown.wait(20.0)
        until_nothing_is_left(session, 20.0)
