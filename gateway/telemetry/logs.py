"""How log lines look, as text or as JSON, and which request they are about.

A line is one line whatever it quotes: characters that would end it, or steer a terminal, are escaped. The
request's id is put there by the formatter, from the context in which the line was logged, so that no
message can forget it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

import orjson

LogFormat = Literal["text", "json"]


class LoggedRequest(NamedTuple):
    """What lines about a request say of it. `trace_id` None: it is in no trace."""

    request_id: str
    trace_id: str | None


REQUEST: ContextVar[LoggedRequest | None] = ContextVar("REQUEST", default=None)
"""The request that the present task is about."""

_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What ends a line somewhere, steers a terminal, or turns the direction of what follows."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class TextFormatter(logging.Formatter):
    """Lines for people. Those of a traceback are indented, so that none looks like another entry."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        line = _escape(super().formatMessage(record))
        about = REQUEST.get()
        if about is None:
            return line
        trace = f" trace_id={about.trace_id}" if about.trace_id is not None else ""
        return f"{line} request_id={about.request_id}{trace}"

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"    {_escape(line)}" for line in lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for programs: `ts` (UTC), `level`, `logger`, `message`, and what there is of
    `request_id`, `trace_id`, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        about = REQUEST.get()
        entry: dict[str, str] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if about is not None:
            entry["request_id"] = about.request_id
            if about.trace_id is not None:
                entry["trace_id"] = about.trace_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(
            {name: _SURROGATE.sub("\ufffd", text) for name, text in entry.items()}
        ).decode()


FORMATTERS: Mapping[LogFormat, type[logging.Formatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
}


def use_format(name: LogFormat) -> None:
    """Let all that is logged in this process have this form."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(FORMATTERS[name]())
