"""What an engine reports of its work in its answer, read in passing.

A hit is measured, an overlap predicted: comparing them needs the cached tokens. The completion's
length tells how many blocks the answer filled. Both stand in the `usage` near the end of an answer or
of a stream, so the last bytes are kept and searched once. An answer that is compressed, or has no
usage, tells nothing.
"""

from __future__ import annotations

import re

TAIL_BYTES = 4096
"""`usage` comes last, but for a stream's end mark and an answer's few trailing fields."""

GATHERED_BYTES_MAX = 16 * TAIL_BYTES
"""Pieces are gathered up to this before they are cut to the tail: most answers never come to it."""

_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d+)')
_POOL = re.compile(rb'"moongate"\s*:\s*\{[^{}]*"pool_tokens"\s*:\s*(\d+)')
"""As `MoongateStoreConnector` reports in whole answers."""

_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d+)')
"""By its names in chats and completions, and in responses and messages."""


class UsageReader:
    """Give it the body as it passes; ask it at the end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self.events = 0  # of a stream, about: one a token, but for a few

    def feed(self, chunk: bytes) -> None:
        self._pieces.append(chunk)
        self.events += chunk.count(b"data:")
        self._size += len(chunk)
        if self._size > GATHERED_BYTES_MAX:
            self._pieces = [self.tail()]
            self._size = len(self._pieces[0])

    def tail(self) -> bytes:
        """Return the last bytes that passed."""
        return b"".join(self._pieces)[-TAIL_BYTES:]

    def cached_tokens(self) -> int | None:
        """Return the hit that the engine reported, None if it didn't."""
        return self._find(_CACHED)

    def prompt_tokens(self) -> int | None:
        """Return the prompt's tokens as the engine counted them, None if it didn't say."""
        return self._find(_PROMPT)

    def pool_tokens(self) -> int | None:
        """Return the prompt tokens that the engine got from the shared pool, None if it didn't say."""
        return self._find(_POOL)

    def completion_tokens(self) -> int | None:
        """Return the tokens that the engine generated, None if it didn't say."""
        return self._find(_COMPLETION)

    def _find(self, pattern: re.Pattern[bytes]) -> int | None:
        found = pattern.findall(self.tail())
        return int(found[-1]) if found else None
