"""A request's body: parsed once, checked for what the gateway relies on, otherwise left alone.

The bytes go to the engine as they came. What is read here: the model, whether a stream is asked for,
session keys, and (in `prompt.py`) the prompt. Unknown fields always pass.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import orjson

from moongate.gateway.dialects.body_limits import check_parts
from moongate.gateway.dialects.json_edits import read_top_level
from moongate.gateway.dialects.routes import PromptKind, Route
from moongate.gateway.errors import GatewayError

SESSION_HEADERS = (
    "x-session-id",
    "x-moongate-session",
    "x-claude-code-session-id",
    "session-id",
    "x-dynamo-session-id",
)
SESSION_KEY_CHARS_MAX = 512
"""Longer keys are cut: they are only hashed, and still as good as distinct."""

OUTLINED_BYTES_MIN = 16_384
"""Larger bodies are outlined before they are parsed."""

READ_WHOLE_BYTES_MAX = 16_777_216
"""Larger ones are read by their outlines only, which takes strict JSON: a lenient parser takes long."""

OUTLINED_FIELDS_MAX = 256
OUTLINED_NAME_CHARS_MAX = 1024
LARGE_VALUE_BYTES = 4096
_KEPT_WHOLE = frozenset(
    (
        "model", "stream", "metadata", "prompt_cache_key", "user", "cache_salt", "stream_options",
        "stop", "stop_sequences", "vllm_xargs",
    )
)  # fmt: skip
"""Fields whose values matter to the gateway, however large."""

SALT = "cache_salt"
"""The field that keeps prompts in an engine's cache apart."""

_STAND_INS = {b"[": b"[0]", b"{": b"{}", b'"': b'"..."'}
"""In an outline, for a large value by its first byte."""

_UNIQUE_KEYS = ("model", "stream")
_UNIQUE_KEY = re.compile(rb'"(?:model|stream)"')
_NAME = re.compile(rb'[\s{,]*+("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*+:\s*+')
"""Matches what comes before a top-level value: at the body's beginning, or at the end of the value before."""

_COMMA = re.compile(rb"\s*+,")
_END = re.compile(rb"[\s{]*+\}")

_ESCAPED_LETTER = re.compile(rb"\\u00[67]")


@dataclass(slots=True)
class Body:
    """What was read from a body. Large bodies are read in full only when `fields` are asked for.

    `top`: the top-level fields; of a large body's large ones at least their type is right.
    `is_lenient`: it has what strict JSON or UTF-8 has not; passed on, and routed by load.
    """

    raw: bytes
    top: Mapping[str, Any]
    model: str | None
    is_stream: bool
    is_lenient: bool = False
    is_outlined: bool = False

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return all fields as they are. Raises: GatewayError (400) for what an outline hid."""
        if self.is_outlined:
            self.top, self.is_lenient = _parse_json(self.raw)
            self.is_outlined = False
        return self.top


def parse_body(raw: bytes, route: Route) -> Body:
    """Return what the gateway needs to know of a body.

    Raises: GatewayError (400).
    """
    outline = None
    if len(raw) > OUTLINED_BYTES_MIN:
        check_parts(raw)
        outline = _outline(raw)
    if outline is None and len(raw) > READ_WHOLE_BYTES_MAX:
        raise _bad(
            f"a body of more than {READ_WHOLE_BYTES_MAX} bytes must be a JSON object in strict JSON and UTF-8,"
            f" with no field given twice and at most {OUTLINED_FIELDS_MAX} fields"
        )
    top, is_lenient = _parse_json(raw if outline is None else outline)
    _refuse_duplicates(raw if outline is None else outline)
    model = top.get("model")
    if model is None and route.needs_model:
        raise _bad("model: missing; name one of the models of /v1/models", "model")
    if model is not None and not isinstance(model, str):
        raise _bad(f"model: expected a string, got {_kind(model)}", "model")
    stream = top.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise _bad(f"stream: expected true or false, got {_kind(stream)}", "stream")
    _check_prompt(top, route)
    return Body(raw, top, model, bool(stream), is_lenient, is_outlined=outline is not None)


def _outline(raw: bytes) -> bytes | None:
    """Return a JSON object's text with its large values cut to their type, None for what is odd.

    Reading agents' bodies and looking for duplicates in them would else be most of what they cost,
    where nobody asks for their messages.
    """
    fields = _top_level(raw)
    if fields is None or not _is_utf8(raw):
        return None  # whoever reads it all will say
    parts: list[bytes] = []
    kept_to = 0
    for field in fields:
        if field.end - field.value_at >= LARGE_VALUE_BYTES and field.name not in _KEPT_WHOLE:
            stand_in = _STAND_INS.get(raw[field.value_at : field.value_at + 1])
            if stand_in is None:
                return None  # a number of thousands of digits
            parts += (raw[kept_to : field.value_at], stand_in)
            kept_to = field.end
    return b"".join([*parts, raw[kept_to:]])


class _Field(NamedTuple):
    """Where a top-level field is."""

    name: str
    name_at: int
    value_at: int
    end: int


def _top_level(raw: bytes) -> list[_Field] | None:
    """Return an object's fields in order. None: it is none in strict JSON, has many, or one twice."""
    try:
        values = read_top_level(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if (
        len(values) > OUTLINED_FIELDS_MAX
        or max(map(len, values), default=0) > OUTLINED_NAME_CHARS_MAX
    ):
        return None
    fields: list[_Field] = []
    position = 0
    for name, value in values.items():  # in the order of the text
        text = bytes(value)
        found = _NAME.match(raw, position)
        if found is None or not raw.startswith(text, found.end()):
            return None  # given twice
        if found[1] != b'"%b"' % name.encode() and msgspec.json.decode(found[1]) != name:
            return None  # the same
        position = found.end() + len(text)
        fields.append(_Field(name, found.start(1), found.end(), position))
    return fields if _END.match(raw, position) else None


def _is_utf8(raw: bytes) -> bool:
    try:
        return raw.isascii() or bool(raw.decode())
    except UnicodeDecodeError:
        return False


def _parse_json(raw: bytes) -> tuple[dict[str, Any], bool]:
    is_lenient = False
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _parse_leniently(raw, error)
        is_lenient = True
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, got {_kind(value)}")
    return value, is_lenient


def _parse_leniently(raw: bytes, error: orjson.JSONDecodeError) -> Any:
    """Parse what Python's own parser takes beyond the standard: NaN, and lone surrogates."""
    if not raw:
        raise _bad("the body is empty; expected a JSON object")
    try:
        return json.loads(raw.decode("utf-8-sig"))  # engines take a byte order mark too
    except UnicodeDecodeError as not_text:
        raise _bad(
            f"the body is not UTF-8: {not_text.reason} at byte {not_text.start}"
        ) from not_text
    except RecursionError as too_deep:
        raise _bad("the body is nested too deeply") from too_deep
    except ValueError:
        raise _bad(f"the body is not JSON: {error}") from error


def _refuse_duplicates(raw: bytes) -> None:
    """Refuse a key given twice that decides where a request goes: parsers differ in which counts."""
    # A key may be spelled with escapes, though nobody honest writes letters so.
    spelled = _UNIQUE_KEY.findall(raw)
    if len(spelled) == len(set(spelled)) and _ESCAPED_LETTER.search(raw) is None:
        return
    top: list[tuple[str, Any]] = []

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        top[:] = pairs  # the outermost object is the last to be complete
        return {}

    try:
        json.loads(raw, object_pairs_hook=note)
    except RecursionError as too_deep:
        raise _bad("the body is nested too deeply") from too_deep
    for key in _UNIQUE_KEYS:
        if sum(name == key for name, _ in top) > 1:
            raise _bad(f"{key}: given twice", key)


def without_key(raw: bytes, key: str) -> bytes:
    """Return a JSON object's text without a top-level key; every other byte stays as it is.

    The text has been parsed before, so it is an object. Raises: GatewayError (400).
    """
    fields = _top_level(raw)
    if fields is not None:
        return _without_field(raw, fields, key)
    try:
        return _without_key(raw, key)
    except RecursionError as too_deep:
        raise _bad("the body is nested too deeply") from too_deep


def _without_field(raw: bytes, fields: Sequence[_Field], key: str) -> bytes:
    for index, field in enumerate(fields):
        if field.name == key:
            is_first = index == 0
            cut_from = field.name_at if is_first else raw.rindex(b",", 0, field.name_at)
            behind = _COMMA.match(raw, field.end)
            return raw[:cut_from] + raw[behind.end() if is_first and behind else field.end :]
    return raw


def _without_key(raw: bytes, key: str) -> bytes:
    text = raw.decode("utf-8", "surrogateescape")
    scan = json.JSONDecoder()
    position = text.index("{") + 1
    parts, kept_to, is_first = [], 0, True
    while True:
        name_at = _skip(text, position, " \t\n\r,")
        if text[name_at] == "}":
            break
        name, colon_at = scan.raw_decode(text, name_at)
        value_at = _skip(text, colon_at, " \t\n\r:")
        _, end = scan.raw_decode(text, value_at)
        if name == key:
            # With it goes the comma before it, or, if it comes first, the one behind it.
            cut_from = name_at if is_first else text.rindex(",", 0, name_at)
            cut_to = end
            behind = _skip(text, end, " \t\n\r")
            if is_first and text[behind] == ",":
                cut_to = behind + 1
            parts.append(text[kept_to:cut_from])
            kept_to = cut_to
        is_first = is_first and name == key
        position = end
    return "".join([*parts, text[kept_to:]]).encode("utf-8", "surrogateescape")


def with_cache_salt(body: Body, salt: str) -> Body:
    """Return a body whose prompt is cached under this salt, whatever it said itself, however often.

    `salt`: of characters that JSON takes as they are. Every other value stays byte for byte. Raises:
    GatewayError (400).
    """
    raw = _without_salt(body.raw) if SALT in body.top else body.raw
    end = raw.rindex(b"}")  # of the object, which has a field: its model
    raw = b"".join((memoryview(raw)[:end], b',"cache_salt":"', salt.encode(), b'"', raw[end:]))
    return replace(body, raw=raw, top={**body.top, SALT: salt})


def _without_salt(raw: bytes) -> bytes:
    """Raises: GatewayError (400)."""
    try:
        fields = read_top_level(raw)
    except (msgspec.MsgspecError, RecursionError):
        return without_key(raw, SALT)  # what only a lenient parser reads; at a tenth of the speed
    fields.pop(SALT, None)
    return msgspec.json.encode(fields)


def with_fields(raw: bytes, fields: bytes) -> tuple[bytes, ...]:
    """Return a JSON object's text in pieces, with fields (JSON, without braces) behind its own.

    The text has been parsed before, so it is an object; that it has a field is assumed.
    """
    end = raw.rindex(b"}")
    return raw[:end], b"," + fields, raw[end:]


def _skip(text: str, position: int, characters: str) -> int:
    while text[position] in characters:
        position += 1
    return position


def _check_prompt(fields: Mapping[str, Any], route: Route) -> None:
    if route.kind is PromptKind.CHAT:
        messages = fields.get("messages")
        if not isinstance(messages, list):
            raise _bad(f"messages: expected a list of messages, got {_kind(messages)}", "messages")
        if not messages:
            raise _bad("messages: empty; expected at least one message", "messages")
    elif route.kind is PromptKind.COMPLETION:
        prompt = fields.get("prompt")
        if prompt is None and fields.get("prompt_embeds") is None:
            raise _bad("prompt: missing; expected a text, token ids, or a list of these", "prompt")
        if prompt is not None and not isinstance(prompt, str | list):
            raise _bad(f"prompt: expected a text or a list, got {_kind(prompt)}", "prompt")


def find_session_key(
    headers: Mapping[str, str], body: Body, extra_header: str | None
) -> str | None:
    """Return the key of the session that a request says it belongs to: headers first."""
    names = SESSION_HEADERS if extra_header is None else (extra_header, *SESSION_HEADERS)
    key = next((headers[name] for name in names if headers.get(name)), None)
    if key is None:
        metadata = body.top.get("metadata")
        user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
        candidates = (body.top.get("prompt_cache_key"), user_id)
        key = next((c for c in candidates if isinstance(c, str) and c), None)
    return _as_key(key) if key is not None else None


def name_session(session_key: str) -> str:
    """Return what a session is called wherever its key itself should not be told: logs, receipts, spans."""
    return hashlib.blake2s(session_key.encode(), digest_size=6).hexdigest()


def find_user(body: Body) -> str | None:
    """Return the `user` field: one user may run many sessions, so it only breaks ties."""
    user = body.top.get("user")
    return _as_key(user) if isinstance(user, str) and user else None


def _as_key(text: str) -> str:
    """Return a text that can be hashed: cut, and without the lone surrogates of lenient bodies."""
    return text[:SESSION_KEY_CHARS_MAX].encode("utf-8", "backslashreplace").decode()


def _bad(message: str, param: str | None = None) -> GatewayError:
    return GatewayError(400, message, "invalid_request", param)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    if value is None:
        return "nothing"
    return names.get(type(value), "a number")
