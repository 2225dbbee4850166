"""Recorded traces as conversations of prompts that are known by their blocks: who shares what with whom.

Pure but for reading files, and free of locust, so that the fleet simulator and the load test read the
same. A trace has no text: a prompt is a list of block ids, and two prompts begin alike as far as their
ids agree. Ids are 64-bit and unique over all conversations, whatever scope the file gives them.

Three formats are read, a file at a time because a whole set doesn't fit into memory:

- *agentic*: `*.json`, one conversation a file, ids that count within the file. The tools and the
  system prompt at a conversation's beginning are in truth shared with other conversations, which the
  ids don't say; with `shares_system` the same model with as many tool tokens has the same tools here,
  and with as many system tokens too the same system prompt.
- *mooncake*: `*.jsonl`, one request a line, ids that count over the file. Requests stand alone.
- *messages*: `*.jsonl`, one conversation a line as chat messages; each answer is a turn. Tokens are
  estimated from the length of the text.

Each may be gzipped (`.gz`).
"""

from __future__ import annotations

import gzip
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

MESSAGES_BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 4
"""What a token of English or code has on average; for texts whose tokenizer isn't known."""

PROBED_BYTES = 1 << 16
"""The beginning of a file that tells its format."""


class TraceError(ValueError):
    """A file or folder is no trace; the text says which, where and why."""


class TraceFormat(Enum):
    AGENTIC = "agentic"
    MOONCAKE = "mooncake"
    MESSAGES = "messages"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One turn. The prompt's last, partial block has no id: it is shared with nobody."""

    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Ids of the full blocks, in order."""
    at_s: float
    """When it was sent: since the conversation began, or since the trace did if it stands alone."""
    think_s: float
    """Since the answer before it, 0 for the first."""
    model: str | None


@dataclass(frozen=True, slots=True)
class TraceConversation:
    """Turns of one session, in order."""

    id: str
    block_size_tokens: int
    requests: Sequence[TraceRequest]
    starts_at_s: float | None
    """Since the trace began; None if the trace doesn't say when conversations begin."""


@dataclass(frozen=True, slots=True)
class TraceSet:
    """Files of one format."""

    format: TraceFormat
    files: tuple[Path, ...]

    def read(self, *, shares_system: bool = True) -> Iterator[TraceConversation]:
        """Yield the conversations in a fixed order, one file in memory at a time.

        Raises: TraceError.
        """
        for file in self.files:
            match self.format:
                case TraceFormat.AGENTIC:
                    yield read_agentic(file, shares_system=shares_system)
                case TraceFormat.MOONCAKE:
                    yield from read_mooncake(file)
                case TraceFormat.MESSAGES:
                    yield from read_messages(file)


def find_traces(folder: Path) -> dict[TraceFormat, TraceSet]:
    """Return what lies in a folder or below it, by format; a file's own name may be given, too.

    Raises: TraceError if there is nothing.
    """
    if not folder.exists():
        raise TraceError(f"{folder}: no such file or folder")
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if _is_data(p))
    by_format: dict[TraceFormat, list[Path]] = {}
    for file in files:
        by_format.setdefault(detect_format(file), []).append(file)
    if not by_format:
        raise TraceError(f"{folder}: no *.json, *.jsonl (or either with .gz) in it")
    return {name: TraceSet(name, tuple(found)) for name, found in by_format.items()}


def _is_data(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz", ".jsonl", ".jsonl.gz"))


def detect_format(file: Path) -> TraceFormat:
    """Return a file's format, told by its first line. Raises: TraceError."""
    try:
        with _open(file) as lines:
            beginning = lines.read(PROBED_BYTES)
    except (OSError, EOFError) as error:
        raise TraceError(f"{file}: {error}") from error
    head = beginning.split(b"\n", 1)[0]
    if b'"input_length"' in head:
        return TraceFormat.MOONCAKE
    if b'"messages"' in head or (head.startswith(b"[") and b'"role"' in head):
        return TraceFormat.MESSAGES
    if b'"block_size"' in beginning:
        return TraceFormat.AGENTIC
    raise TraceError(f"{file}: neither agentic, nor mooncake, nor messages; see docs/loadtest.md")


# --- agentic --------------------------------------------------------------------------------------


def read_agentic(file: Path, *, shares_system: bool = True) -> TraceConversation:
    """Return the conversation in a file; sub-agents' turns stand where they were called.

    Raises: TraceError.
    """
    try:
        with _open(file) as stream:
            data = orjson.loads(stream.read())
        name = str(data["id"])
        return TraceConversation(
            id=name,
            block_size_tokens=int(data["block_size"]),
            requests=tuple(_agentic_requests(data, name, shares_system)),
            starts_at_s=None,
        )
    except (OSError, EOFError, orjson.JSONDecodeError) as error:
        raise TraceError(f"{file}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{file}: not an agentic trace: {error!r}") from error


def _agentic_requests(
    data: Mapping[str, Any], name: str, shares_system: bool
) -> Iterator[TraceRequest]:
    block_size = int(data["block_size"])
    names: dict[int, int] = {}
    for agent, model, values, began_s in _agents(data):
        shared = _system_blocks(agent, model, block_size) if shares_system else ()
        for number, value in enumerate(values):
            yield TraceRequest(
                prompt_tokens=int(value["in"]),
                output_tokens=max(int(value["out"]), 1),
                blocks=_unique_ids(value["hash_ids"], name, names, shared),
                at_s=began_s + float(value["t"]),
                think_s=float(value.get("think_time") or 0.0) if number else 0.0,
                model=str(value["model"]) if value.get("model") else model,
            )


Agent = tuple[Mapping[str, Any], str | None, Sequence[Mapping[str, Any]], float]


def _agents(data: Mapping[str, Any]) -> Iterator[Agent]:
    """Yield runs of turns of one agent: its facts, model, turns, and when their clock began (s)."""
    own = _first_model(data)
    for is_sub, run in itertools.groupby(data["requests"], lambda value: "requests" in value):
        if not is_sub:
            yield data, own, [value for value in run if "hash_ids" in value], 0.0
            continue
        for sub in run:
            yield sub, _first_model(sub), sub["requests"], float(sub["t"])


def _first_model(agent: Mapping[str, Any]) -> str | None:
    models = agent.get("models") or [None]
    return None if models[0] is None else str(models[0])


def _system_blocks(agent: Mapping[str, Any], model: str | None, block_size: int) -> array[int]:
    """Return the ids of an agent's tools and system prompt, the same for all with as many tokens."""
    tools, system = int(agent.get("tool_tokens") or 0), int(agent.get("system_tokens") or 0)
    tool_blocks, blocks = tools // block_size, (tools + system) // block_size
    return array(
        "Q",
        [
            _name_id(f"{model}/{tools}" if n < tool_blocks else f"{model}/{tools}/{system}", n)
            for n in range(blocks)
        ],
    )


def _unique_ids(
    ids: Sequence[int], scope: str, names: dict[int, int], shared: Sequence[int]
) -> array[int]:
    """Return ids that mean the same in every file; the first ones are replaced by shared ones."""
    count = min(len(shared), len(ids))
    own = ids[count:]
    for one in own:
        if one not in names:
            names[one] = _name_id(scope, one)
    return array("Q", itertools.chain(shared[:count], map(names.__getitem__, own)))


def _name_id(scope: str, number: int) -> int:
    return int.from_bytes(blake2b(f"{scope}#{number}".encode(), digest_size=8).digest(), "little")


# --- mooncake -------------------------------------------------------------------------------------

MOONCAKE_BLOCK_TOKENS = 512


def read_mooncake(file: Path) -> Iterator[TraceConversation]:
    """Yield the requests of a file, each as a conversation of one turn. Raises: TraceError."""
    names: dict[int, int] = {}

    def convert(value: Any, number: int) -> TraceConversation:
        tokens, at_s = int(value["input_length"]), float(value["timestamp"]) / 1000
        ids = value["hash_ids"][
            : tokens // MOONCAKE_BLOCK_TOKENS
        ]  # the last may be a partial block
        request = TraceRequest(
            prompt_tokens=tokens,
            output_tokens=max(int(value["output_length"]), 1),
            blocks=_unique_ids(ids, "mooncake", names, ()),
            at_s=at_s,
            think_s=0.0,
            model=None,
        )
        return TraceConversation(f"line_{number}", MOONCAKE_BLOCK_TOKENS, (request,), at_s)

    yield from _read_lines(file, convert, "mooncake")


# --- messages -------------------------------------------------------------------------------------


def read_messages(file: Path) -> Iterator[TraceConversation]:
    """Yield the conversations of a file: a list of messages a line, or an object with `messages`.

    Each message of the assistant is a turn, whose prompt is what stands before it. `timestamp`s of
    messages (s) become pauses. Raises: TraceError.
    """

    def convert(value: Any, number: int) -> TraceConversation:
        messages = value if isinstance(value, list) else value["messages"]
        name = value.get("id") if isinstance(value, dict) else None
        requests = tuple(_message_turns(messages))
        return TraceConversation(
            str(name or f"line_{number}"), MESSAGES_BLOCK_TOKENS, requests, None
        )

    yield from _read_lines(file, convert, "messages")


def _message_turns(messages: Sequence[Mapping[str, Any]]) -> Iterator[TraceRequest]:
    text, blocks, chain = b"", array("Q"), b""
    block_bytes = MESSAGES_BLOCK_TOKENS * BYTES_PER_TOKEN
    began_s, answered_s = _stamp(messages[0]) if messages else None, None
    for number, message in enumerate(messages):
        own = _text_of(message)
        if message["role"] == "assistant" and number:
            while (len(blocks) + 1) * block_bytes <= len(text):
                piece = text[len(blocks) * block_bytes :][:block_bytes]
                chain = blake2b(chain + piece, digest_size=8).digest()
                blocks.append(int.from_bytes(chain, "little"))
            sent_s = _stamp(messages[number - 1])
            yield TraceRequest(
                prompt_tokens=max(-(-len(text) // BYTES_PER_TOKEN), 1),
                output_tokens=max(len(own) // BYTES_PER_TOKEN, 1),
                blocks=array("Q", blocks),
                at_s=_since(began_s, sent_s),
                think_s=_since(answered_s, sent_s),
                model=None,
            )
            answered_s = _stamp(message)
        text += own


def _text_of(message: Mapping[str, Any]) -> bytes:
    """Return what a message adds to a prompt: role, content, calls of tools."""
    content = message.get("content") or ""
    calls = message.get("tool_calls")
    parts = [message["role"].encode(), b"\n"]
    parts.append(content.encode() if isinstance(content, str) else orjson.dumps(content))
    parts.append(orjson.dumps(calls) if calls else b"")
    return b"".join(parts) + b"\n"


def _stamp(message: Mapping[str, Any]) -> float | None:
    value = message.get("timestamp")
    return float(value) if isinstance(value, int | float) else None


def _since(earlier: float | None, later: float | None) -> float:
    return max(later - earlier, 0.0) if earlier is not None and later is not None else 0.0


# --- files ----------------------------------------------------------------------------------------


def _read_lines(
    file: Path, convert: Callable[[Any, int], TraceConversation], name: str
) -> Iterator[TraceConversation]:
    number = 0
    try:
        with _open(file) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield convert(orjson.loads(line), number)
    except (OSError, EOFError) as error:
        raise TraceError(f"{file}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{file}:{number}: not a {name} trace: {error!r}") from error


def _open(file: Path) -> Any:
    """Return the file for reading bytes, unpacked if it is gzipped."""
    return gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")
