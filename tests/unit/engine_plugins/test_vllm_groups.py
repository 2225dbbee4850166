"""What vLLM's own cache manager says of several KV groups: reuse is credited as it found it.

The recordings were made by `scripts/record_vllm_groups.py` with vLLM 0.32.
"""

import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moongate.engine_plugins.vllm_wire import Frame, decode_batch
from moongate.router import (
    BlockSpace,
    Holder,
    InstanceAdded,
    InstanceDescribed,
    InstanceFacts,
    InstanceId,
    InstanceProbed,
    InstanceSpec,
    ModelCard,
    Prompt,
    Request,
    RequestId,
    RouterCore,
    SourceId,
    SourceOpened,
    Trust,
    make_policy,
)
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.invariants import check

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "vllm_groups"

A = InstanceId("a")
HOLDER, SOURCE = Holder(A), SourceId(A)

EXACT = [
    "one-group",
    "gpt-oss",
    "gemma3",
    "two-windows",
    "two-full",
    "large-window-blocks",
    "small-window-blocks",
    "sparse-windows",
    "mamba-all",
    "mamba-align",
    "mamba-parts",
]


def read(name: str) -> list[tuple[list[int], int, list[bytes]]]:
    """Return a recording: of each prompt its tokens, those found cached, and what was published."""
    packed = zlib.decompress((RECORDINGS / f"{name}.msgpack.z").read_bytes())
    recording: Any = msgspec.msgpack.decode(packed)
    return [(tokens, cached, batches) for tokens, cached, batches in recording]


def make_core() -> RouterCore:
    core = RouterCore(make_policy("kv_cost"), lambda n: n - 1)
    for event in (
        InstanceAdded(InstanceSpec(A)),
        InstanceDescribed(A, InstanceFacts((ModelCard("m"),), block_size_tokens=4)),
        InstanceProbed(A, is_healthy=True),
        SourceOpened(SOURCE, has_replay=False),
    ):
        core.handle(event, 0.0)
    return core


def credited_tokens(core: RouterCore, tokens: list[int]) -> int:
    """Return how much of a prompt the instance is confirmed to hold."""
    packed = pack_tokens(tokens)
    chains = {space: hash_prompt(space, packed) for space in core.spaces("m")}
    request = Request(RequestId("r"), "m", Prompt(len(tokens), chains))
    decision = core.explain(request, 0.0)
    assert decision is not None
    return decision.ranking[0].candidate.confirmed_tokens


def credit_all(core: RouterCore, name: str) -> list[tuple[int, int]]:
    """Return for each prompt of a recording what is credited and what vLLM found."""
    outcomes: list[tuple[int, int]] = []
    sequence = 0
    for tokens, cached_tokens, batches in read(name):
        outcomes.append((credited_tokens(core, tokens), cached_tokens))
        for payload in batches:
            core.handle(decode_batch(SOURCE, Frame(b"", sequence, payload)), 0.0)
            sequence += 1
            check(core)
    return outcomes


@pytest.mark.parametrize("name", EXACT)
def test_reuse_is_credited_as_vllm_finds_it(name: str) -> None:
    core = make_core()
    outcomes = credit_all(core, name)
    assert [credited for credited, _ in outcomes] == [found for _, found in outcomes]
    assert sum(found > 0 for _, found in outcomes) >= 15
    assert core.sources.trust(HOLDER) is Trust.EXACT


def test_where_a_chunks_size_is_not_told_no_more_is_credited_than_is_there() -> None:
    outcomes = credit_all(make_core(), "local-chunks")
    assert all(credited <= found for credited, found in outcomes)
    assert sum(credited > 0 for credited, _ in outcomes) >= 15


def test_a_part_of_a_block_does_not_change_the_block_size() -> None:
    core = make_core()
    credit_all(core, "small-window-blocks")
    ((_, state),) = core.sources
    assert state.ledger.counts.ignored_blocks > 0
    assert core.spaces("m") == {BlockSpace(8)}
