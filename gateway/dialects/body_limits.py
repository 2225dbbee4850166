"""How much a body may have of what is dear to whoever reads it: parts, depth, messages, stop strings.

How many parts there are is told by its bytes, before anything is made of them. The rest is looked at where a body
has been parsed anyway. Of a large one that is only outlined (`body.py`) that is when its
fields are asked for: by a policy that reads prompts, so before anything is sent anywhere. By the others it is not
taken apart at all, and parsers' own limit of about 1,000 levels is all that holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moongate.gateway.config.process_settings import LimitsSettings
from moongate.gateway.errors import GatewayError

PARTS_MAX = 1 << 19
"""Lists, objects, names and texts of one body. Each becomes an object of 50 to 250 bytes; all these take up to 0.2 s
and some 100 MB. A chat of 100,000 messages has 500,000."""

VALUES_MAX = 1 << 21
"""Values of lists and objects, numbers included: twice the token ids of the longest contexts. 40 bytes each."""

_CHUNK_BYTES = 1 << 18
"""How much of a body is counted at once: what is too much is known soon, and takes little memory."""

_ITEMS = ("messages", "input", "prompt", "documents")
"""Fields that may be lists of what engines take one by one."""

_STOPS = ("stop", "stop_sequences")
_CONTAINERS = (dict, list)


def check_parts(raw: bytes) -> None:
    """Refuse a body that would be parsed into more objects than are worth it. Raises: GatewayError (400).

    Its bytes need not be JSON: what a parser reads of them before it fails is counted right. Cost: nothing up to
    512 KiB, then 0.6 ns a byte; 4 ns where texts are full of the signs that are counted.
    """
    if len(raw) <= PARTS_MAX or len(raw) - len(raw.translate(None, b'",[{')) <= PARTS_MAX:
        return
    quotes = containers = values = start = 0
    while start < len(raw):
        chunk = _chunk(raw, start)
        start += len(chunk)
        if b"\\" in chunk:
            chunk = chunk.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = chunk.split(b'"')
        between_texts = b"".join(pieces[quotes % 2 :: 2])
        quotes += len(pieces) - 1
        containers += between_texts.count(b"[") + between_texts.count(b"{")
        values += between_texts.count(b",")
        if quotes // 2 + containers > PARTS_MAX:
            raise _too_many("lists, objects, names and texts", PARTS_MAX)
        if values > VALUES_MAX:
            raise _too_many("values", VALUES_MAX)


def _chunk(raw: bytes, start: int) -> bytes:
    """Return the next bytes, without half an escape at their end."""
    chunk = raw[start : start + _CHUNK_BYTES]
    backslashes = len(chunk) - len(chunk.rstrip(b"\\"))
    is_cut = backslashes % 2 == 1 and start + len(chunk) < len(raw)
    return chunk[:-1] if is_cut else chunk


def _too_many(what: str, maximum: int) -> GatewayError:
    return GatewayError(400, f"the body has more than {maximum} {what}", "invalid_request")


def check_limits(fields: Mapping[str, Any], size_bytes: int, limits: LimitsSettings) -> None:
    """Refuse a body that exceeds a limit. Raises: GatewayError (400) naming what, where and the limit.

    Cost: O(lists and objects in it), 14 µs for a conversation of 80 messages, 50 µs with 20 tools beside it.
    """
    for name in _ITEMS:
        items = fields.get(name)
        if isinstance(items, list) and len(items) > limits.messages_max and not _are_ids(items):
            raise _too_much(name, f"{len(items)} items", "messages_max", limits.messages_max)
    for name in _STOPS:
        stops = fields.get(name)
        if isinstance(stops, list) and len(stops) > limits.stop_max:
            raise _too_much(name, f"{len(stops)} stop strings", "stop_max", limits.stop_max)
    # A level takes two characters at least.
    if size_bytes > 2 * limits.json_depth_max and _is_deeper(fields, limits.json_depth_max):
        inside = limits.json_depth_max - 1
        name = next(name for name, value in fields.items() if _is_deeper(value, inside))
        raise _too_much(name, "nested too deeply", "json_depth_max", limits.json_depth_max)


def _is_deeper(value: Any, levels: int) -> bool:
    """Tell whether lists and objects are nested in a value by more than so many levels, its own counted."""
    level = [value] if value.__class__ in _CONTAINERS else []
    for _ in range(levels):
        level = [
            item
            for one in level
            for item in (one.values() if one.__class__ is dict else one)
            if item.__class__ in _CONTAINERS
        ]
        if not level:
            return False
    return bool(level)


def _are_ids(items: list[Any]) -> bool:
    """Tell whether a list is one prompt as token ids."""
    return isinstance(items[0], int)


def _too_much(name: str, what: str, limit: str, maximum: int) -> GatewayError:
    return GatewayError(
        400, f"{name[:64]}: {what}; limits.{limit} is {maximum}", "invalid_request", name[:64]
    )
