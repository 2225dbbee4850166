"""What the panel of `moongate up` says, from parts written out by hand."""

import io
from typing import Any

from rich.console import Console

from moongate.stack_panel import make_panel, takes_panel

CACHE = {
    "rank": None,
    "trust": "exact",
    "active_requests": 2,
    "queued_prefill_tokens": 1200,
    "tokens_held": {"device": 5000, "host": 0, "disk": 0, "pool": 0},
    "predicted_tokens": 0,
}
INSTANCE = {"id": "engine-a", "state": "up", "capacity_tokens": 20000, "caches": [CACHE]}
TOTALS = {
    "requests": 1234,
    "active_requests": 2,
    "device_tokens": 600,
    "pool_tokens": 200,
    "recompute_tokens": 200,
    "ttft_ms_p50": 81.6,
}
DECISION = {
    "session": {"number": 3, "key": "checkout"},
    "instance": "engine-a",
    "reason": "device_prefix",
    "prompt_tokens": 5660,
    "device_tokens": 5200,
    "pool_tokens": 100,
}


def shown(width: int = 100, **changed: Any) -> str:
    parts: dict[str, Any] = {
        "gateway": {"is_draining": False},
        "instances": {"count": 1, "shown": [INSTANCE]},
        "totals": TOTALS,
        "decisions": {"count": 1, "shown": [DECISION]},
        **changed,
    }
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None,
        _environ={"TERM": "xterm"},  # on a dumb terminal the width would not count
    )  # fmt: skip
    with console.capture() as captured:
        console.print(make_panel(parts, width))
    return captured.get()


def test_engines_requests_reuse_and_the_last_decision() -> None:
    text = shown()
    (engine,) = [line for line in text.splitlines() if "engine-a  " in line]
    for said in ("up", " 2 ", "1,200 tokens", "5,000 tokens (25%)"):
        assert said in engine
    assert (
        "requests 1,234 (2 under way)   reuse 80% of 1,000 prompt tokens   first token 82 ms"
        in text
    )
    assert (
        "last: checkout to engine-a, which holds the prefix, reuses 5,300 of 5,660 tokens" in text
    )
    assert "Ctrl-C stops all of it" in text


def test_before_the_first_request_it_says_what_to_do() -> None:
    none = {
        **TOTALS,
        "device_tokens": 0,
        "pool_tokens": 0,
        "recompute_tokens": 0,
        "ttft_ms_p50": None,
    }
    text = shown(totals=none, decisions={"count": 0, "shown": []})
    assert "No request yet: paste the curl line above" in text
    assert "reuse: no prompt yet" in text


def test_a_clients_text_is_no_command_to_the_terminal() -> None:
    key = "a\x1b[2Jb\x07\u202e\n" + "x" * 100
    text = shown(
        decisions={"count": 1, "shown": [{**DECISION, "session": {"number": 1, "key": key}}]}
    )
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "[/red][bold]" in shown(
        decisions={
            "count": 1,
            "shown": [{**DECISION, "session": {"number": 1, "key": "[/red][bold]"}}],
        }
    )
    assert len(text.splitlines()) == len(shown().splitlines())


def test_while_it_stops_it_says_how_to_hurry() -> None:
    assert "stopping; Ctrl-C again: at once" in shown(gateway={"is_draining": True})


def test_it_fits_a_narrow_terminal() -> None:
    assert max(map(len, shown(width=50).splitlines())) == 50


def test_what_is_no_terminal_gets_no_panel() -> None:
    assert not takes_panel(io.StringIO())
