"""Small traces of our own in the formats that `moongate.loadtest.traces` reads."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def agentic_request(t: float, tokens: int, ids: Sequence[int], **more: Any) -> dict[str, Any]:
    return {
        "t": t, "type": "n", "model": "large", "in": tokens, "out": 20, "hash_ids": list(ids),
        "think_time": 0.5, **more,
    }  # fmt: skip


def write_agentic(
    folder: Path,
    name: str,
    requests: Sequence[Mapping[str, Any]],
    tools: int = 128,
    system: int = 64,
) -> Path:
    """Write one conversation, gzipped, and return its file. Blocks have 64 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json.gz"
    data = {
        "id": name, "models": ["large"], "block_size": 64, "hash_id_scope": "local",
        "tool_tokens": tools, "system_tokens": system, "requests": list(requests),
    }  # fmt: skip
    file.write_bytes(gzip.compress(json.dumps(data).encode()))
    return file


def write_growing_agentic(folder: Path, name: str, turns: int, blocks: int = 6) -> Path:
    """Write a conversation that grows by three blocks each turn."""
    requests = [
        agentic_request(float(n), (blocks + 3 * n) * 64 + 10, range(1, blocks + 3 * n + 1))
        for n in range(turns)
    ]
    return write_agentic(folder, name, requests)


def write_mooncake(folder: Path, rows: Sequence[tuple[int, int, Sequence[int]]]) -> Path:
    """Write (timestamp in ms, prompt tokens, ids) and return the file. Blocks have 512 tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chats.jsonl"
    lines = [
        json.dumps({"timestamp": at, "input_length": n, "output_length": 7, "hash_ids": list(ids)})
        for at, n, ids in rows
    ]
    file.write_text("\n\n".join(lines) + "\n")
    return file


def write_messages(folder: Path, conversations: Sequence[Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "messages.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in conversations))
    return file
