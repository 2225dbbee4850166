"""Lines of the log: one line each, whatever they quote, with the request that they are about."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from moongate.gateway.telemetry.logs import (
    REQUEST,
    JsonFormatter,
    LoggedRequest,
    TextFormatter,
    use_format,
)

NASTY = "x\r\n2026-01-01 00:00:00,000 ERROR root: made up\x1b[31m\u2028\u202e"


@contextlib.contextmanager
def about(request: LoggedRequest) -> Iterator[None]:
    token = REQUEST.set(request)
    try:
        yield
    finally:
        REQUEST.reset(token)


def record(message: str, *args: object, has_error: bool = False) -> logging.LogRecord:
    error = None
    if has_error:
        try:
            raise ValueError(NASTY)
        except ValueError:
            error = sys.exc_info()
    return logging.LogRecord("moongate.x", logging.WARNING, "f", 1, message, args, error)


def test_a_text_line_stays_one_line() -> None:
    line = TextFormatter().format(record("quoted %s", NASTY))
    assert len(line.splitlines()) == 1
    assert "\\u000d\\u000a2026" in line
    assert "\x1b" not in line
    assert "\u202e" not in line


def test_no_line_of_a_traceback_looks_like_another_entry() -> None:
    lines = TextFormatter().format(record("a bug", has_error=True)).splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING moongate\.x: a bug$", lines[0])
    assert len(lines) > 3
    assert all(line.startswith("    ") for line in lines[1:])


def test_a_line_says_which_request_it_is_about() -> None:
    with about(LoggedRequest("r1", "t1")):
        assert TextFormatter().format(record("m")).endswith(": m request_id=r1 trace_id=t1")
        entry = json.loads(JsonFormatter().format(record("m")))
    assert (entry["request_id"], entry["trace_id"]) == ("r1", "t1")
    with about(LoggedRequest("r1", None)):
        assert TextFormatter().format(record("m")).endswith(": m request_id=r1")
        assert "trace_id" not in JsonFormatter().format(record("m"))
    assert "request_id" not in TextFormatter().format(record("m"))


def test_a_json_line_is_one_object() -> None:
    line = JsonFormatter().format(record("quoted %s \ud800", NASTY, has_error=True))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == f"quoted {NASTY} \ufffd"
    assert (entry["level"], entry["logger"]) == ("warning", "moongate.x")
    assert entry["exception"].startswith("Traceback")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", entry["ts"])


def test_a_format_is_that_of_all_that_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    use_format("json")
    assert isinstance(handler.formatter, JsonFormatter)
    use_format("text")
    assert isinstance(handler.formatter, TextFormatter)
