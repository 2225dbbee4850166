"""Redis may hold anything under our names: a response is what it was, or isn't known, and nothing raises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from odd_values import damaged, objects, quick

from moongate.gateway.dialects.json_edits import read_top_level
from moongate.gateway.responses.response_sharing import SharedResponses
from moongate.gateway.responses.response_store import ResponseStore

NAMES = st.tuples(st.sampled_from(["r1", "r2", ""]), st.sampled_from(["v1", "v2", ""]))
HEADS = st.tuples(st.lists(NAMES, max_size=3), st.booleans(), st.booleans())
TEXTS = (
    st.binary(max_size=12)
    | objects("id", "status", "output").map(lambda value: json.dumps(value).encode())
    | st.sampled_from([b"", b"[]", b"null", b'{"id":"r1","status":"in_progress","output":[]}'])
)
CONTENTS = st.tuples(TEXTS, TEXTS, TEXTS, TEXTS)


def packed(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    whole = values.map(msgspec.msgpack.encode)
    return whole | whole.flatmap(damaged) | st.binary(max_size=24)


class Commands:
    """A pipeline that notes what is asked and gives what was drawn."""

    def __init__(self, head: bytes | None, content: bytes | None, *, has_run: bool) -> None:
        self._head, self._content, self._has_run = head, content, has_run
        self.answers: list[object] = []

    def getex(self, _: str, ex: int) -> None:
        assert ex > 0
        self.answers.append(self._head)

    def get(self, _: str) -> None:
        self.answers.append(self._content)

    def expire(self, _: str, ttl_s: int) -> None:
        assert ttl_s > 0
        self.answers.append(1)

    def exists(self, _: str) -> None:
        self.answers.append(int(self._has_run))


class State:
    """A Redis with these values under every name."""

    up_since = -1000.0

    def __init__(self, head: bytes | None, content: bytes | None, *, has_run: bool) -> None:
        self._values = head, content, has_run

    async def ask(self, commands: Callable[[Any], object]) -> list[object]:
        head, content, has_run = self._values
        pipeline = Commands(head, content, has_run=has_run)
        commands(pipeline)
        return pipeline.answers

    tell = ask


@quick
@given(
    head=st.none() | packed(HEADS),
    content=st.none() | packed(CONTENTS),
    has_run=st.booleans(),
)
def test_any_value_is_a_response_or_none(
    head: bytes | None, content: bytes | None, has_run: bool
) -> None:
    async def find() -> None:
        store = ResponseStore(60.0, 1 << 20)
        state: Any = State(head, content, has_run=has_run)
        shared = SharedResponses(store, state, 60.0)
        try:
            found = await shared.find("t", "r1", 0.0)
        finally:
            await shared.close()
        if found is not None:
            assert found.tenant == "t"
            read_top_level(found.response)
            json.loads(b"[" + found.history() + b"]")

    asyncio.run(find())
