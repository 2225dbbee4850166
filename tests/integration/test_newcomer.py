"""The newcomer's path, as the README prints it: a fresh clone, `make demo`, `make run`, a load test.

The clone gets an environment with the packages of the one that runs the tests, and the clone's own code:
the set-up would take minutes. With MOONGATE_FRESH_INSTALL=1 the targets do it themselves, as for a
newcomer (and the time-out is longer). Only what is committed is cloned.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import Child, free_port, until

PROJECT = Path(__file__).parents[2]
IS_FRESH = os.environ.get("MOONGATE_FRESH_INSTALL") == "1"
SETUP_S = 600.0 if IS_FRESH else 0.0

pytestmark = pytest.mark.timeout(240 + SETUP_S)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of what is committed, with an environment to run it in."""
    if not (PROJECT / ".git").exists():
        pytest.skip("no git repository to clone: this is an unpacked archive")
    folder = tmp_path_factory.mktemp("newcomer") / "moongate"
    subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(folder)], check=True)
    if not IS_FRESH:
        borrow_environment(folder)
    return folder


def borrow_environment(folder: Path) -> None:
    """Make a `.venv` that finds our packages, but imports moongate from the clone."""
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / "src").mkdir()
    (venv / "src" / "moongate").symlink_to(folder)
    (packages,) = venv.glob("lib/python*/site-packages")
    # The packages' own .pth files, among them that of the project's tree, don't count behind this one.
    (packages / "clone.pth").write_text(f"{venv / 'src'}\n{sysconfig.get_path('purelib')}\n")
    command = venv / "bin" / "moongate"
    command.write_text(
        f"#!{venv / 'bin' / 'python'}\nimport sys\nfrom moongate.cli import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    (venv / ".ready").touch()


def test_make_demo_prints_a_row_for_each_policy(clone: Path) -> None:
    done = subprocess.run(
        ["make", "demo"], cwd=clone, capture_output=True, text=True, timeout=180 + SETUP_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        line.split()[0]: line.split()[1:]
        for line in done.stdout.splitlines()
        if re.match(r"(round_robin|least_loaded|kv_cost) +\d", line)
    }
    assert list(rows) == ["round_robin", "least_loaded", "kv_cost"], done.stdout
    for turns, failed, *_ in rows.values():
        assert int(turns) > 0
        assert failed == "0"
    assert "cached share" in done.stdout
    assert (clone / "demo-report" / "comparison.html").exists()
    imported = subprocess.run(
        [".venv/bin/python", "-c", "import moongate.cli as c; print(c.__file__)"],
        cwd=clone, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(imported.stdout.strip()).resolve() == clone / "cli.py"


@pytest.fixture(scope="module")
def run(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Yield `make run`, once it has printed all of its lines; end it by Ctrl-C, and see that all is gone."""
    port = free_port()
    log = tmp_path_factory.mktemp("run") / "run.log"
    argv = ["make", "-C", str(clone), "run", f"PORT={port}"]
    child = Child.start(argv, f"http://127.0.0.1:{port}", log)
    try:
        until(
            lambda: (
                "Ctrl-C stops all of it." in log.read_text() or child.process.poll() is not None
            ),
            60.0 + SETUP_S,
            child.tail,
        )
        assert child.process.poll() is None, child.tail()
        yield child
        os.killpg(child.process.pid, signal.SIGINT)
        child.process.wait(20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{child.url}/health", trust_env=False)
        with pytest.raises(ProcessLookupError):
            os.killpg(child.process.pid, 0)
    finally:
        child.kill()


def test_make_run_prints_what_to_try_and_it_works(run: Child) -> None:
    text = run.log.read_text()
    assert f"{run.url}/v1" in text
    assert f"{run.url}/ui" in text
    found = re.search(r"curl -i (\S+) -H '(\S+): (\S+)' \\\n +-d '(.*)'", text)
    assert found is not None, text
    url, header, value, body = found.groups()
    answers = [
        httpx.post(url, headers={header: value}, content=body, timeout=30, trust_env=False)
        for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.headers["x-moongate-instance"] for answer in answers)
    assert first == second
    assert answers[1].headers["x-moongate-reason"] == "device_prefix"


def test_the_dashboard_answers(run: Child) -> None:
    answer = httpx.get(f"{run.url}/ui", follow_redirects=True, trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")


def test_the_load_test_of_the_readme_writes_its_report(run: Child, clone: Path) -> None:
    (line,) = re.findall(
        r"^\.venv/bin/moongate loadtest .*$", (clone / "README.md").read_text(), re.MULTILINE
    )
    shorter = ["--users", "4", "--duration", "4s", "--url", run.url, "--out", "report"]
    done = subprocess.run(
        [*shlex.split(line), *shorter], cwd=clone, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((clone / "report" / "report.json").read_text())
    assert report["requests"] > 0
    assert report["failures"] == 0
    for name in ("report.html", "requests.csv"):
        assert (clone / "report" / name).exists()
        assert name in done.stdout
