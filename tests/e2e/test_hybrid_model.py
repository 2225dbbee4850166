"""A model most of whose layers attend to a window: reuse is predicted as the engine finds it.

Gemma 3 in small: of three KV groups two keep the last 99 tokens before where a request stands, and the
rest of their blocks is free to go. So a prompt may be in the full-attention group to its end and yet be
of use only up to where an earlier request ended, or its chunk of prefill.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_truth import COPIES, complete, replayed_events
from live_gateway import LiveGateway, live_gateway, until
from processes import BLOCK_TOKENS, EngineProcess, running

from moongate.router import BlockSpace, Holder, InstanceId, Tier, Trust
from moongate.router.blocks import hash_prompt, pack_tokens
from moongate.router.ledger import Ledger

BLOCKS = 300
"""For all groups together: some five prompts of the longest."""

PROMPT_TOKENS_MAX = 1500
VOCABULARY = range(10, 4000)
HOLDER = Holder(InstanceId("a"))
GROUPS = {0: "sliding_window", 1: "sliding_window", 2: "full_attention"}


@pytest.fixture(scope="module")
def hybrid_engine(
    tiny_hybrid_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """Return an engine that computes 512 tokens at a time, and so frees blocks while it prefills."""
    engine = EngineProcess.make(
        tiny_hybrid_model,
        tmp_path_factory.mktemp("hybrid"),
        "hybrid",
        gpu_blocks_override=BLOCKS,
        max_model_len_tokens=2048,
        extra_args=("--max-num-batched-tokens", "512"),
    )
    with running(engine):
        yield engine


def replayed(endpoint: str) -> tuple[dict[int, set[int]], dict[int, str]]:
    """Return each group's blocks by the engine's full replay, decoded independently, and its kind."""
    copies: Counter[tuple[int, int]] = Counter()
    kinds: dict[int, str] = {}
    for event in replayed_events(endpoint):
        if event["type"] == "BlockStored":
            kinds[event["group_idx"]] = event["kv_cache_spec_kind"]
        for block in event["block_hashes"]:
            copies[event["group_idx"], block] += COPIES[event["type"]]
    held: dict[int, set[int]] = {group: set() for group in kinds}
    for (group, block), count in copies.items():
        if count > 0:
            held[group].add(block)
    return held, kinds


class Conversations:
    """Prompts that grow, are repeated, are cut short and branch off: in `chance`'s order."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.prompts = [self.tokens(400) for _ in range(3)]

    def tokens(self, count: int) -> list[int]:
        return [self.chance.choice(VOCABULARY) for _ in range(count)]

    def next(self) -> list[int]:
        chance = self.chance
        number = chance.randrange(len(self.prompts))
        prompt = self.prompts[number]
        match chance.choice(["grow", "grow", "grow", "repeat", "cut", "branch", "new"]):
            case "grow":
                prompt = prompt + self.tokens(chance.randint(1, 250))
            case "cut":
                prompt = prompt[: chance.randint(1, len(prompt))]
            case "branch":
                prompt = prompt[: chance.randint(1, len(prompt))] + self.tokens(100)
            case "new":
                prompt = self.tokens(chance.randint(100, 700))
        if len(prompt) > PROMPT_TOKENS_MAX:
            prompt = self.tokens(300)
        self.prompts[number] = prompt
        return prompt


def ledger_of(gateway: LiveGateway) -> Ledger:
    ((_, state),) = gateway.core.sources
    return state.ledger


def full_attention_blocks(gateway: LiveGateway, prompt: list[int], tokens: int) -> int:
    """Return how many leading blocks of these tokens the full-attention group alone has."""
    held = {block for _, block in ledger_of(gateway).held()}
    blocks = hash_prompt(BlockSpace(BLOCK_TOKENS), pack_tokens(prompt[:tokens]))
    return next((n for n, block in enumerate(blocks) if block not in held), len(blocks))


async def have_events(gateway: LiveGateway, prompt: list[int]) -> None:
    """Return when what the engine said of its last request was taken in."""
    count = len(prompt) // BLOCK_TOKENS
    await until(lambda: full_attention_blocks(gateway, prompt, len(prompt)) == count)
    await asyncio.sleep(0.05)


@pytest.mark.asyncio
@pytest.mark.timeout(300)
async def test_reuse_is_what_the_engine_finds_in_all_its_groups(
    hybrid_engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    conversations = Conversations(random.Random(8))
    outcomes: list[tuple[int, int]] = []
    promised: list[int] = []
    async with live_gateway([hybrid_engine.url]) as gateway:
        for _ in range(100):
            prompt = conversations.next()
            full_blocks = full_attention_blocks(gateway, prompt, len(prompt) - 1)
            promised.append(full_blocks * BLOCK_TOKENS)
            outcomes.append(await complete(gateway.client, prompt, max_tokens=4))
            await have_events(gateway, prompt)
        assert [predicted for predicted, _ in outcomes] == [cached for _, cached in outcomes]
        hits = [cached for _, cached in outcomes if cached]
        windowed = sum(cached < full for full, (_, cached) in zip(promised, outcomes, strict=True))
        assert len(hits) >= 30
        assert windowed >= 10, "the windows made no difference"
        assert await gateway.metric("moongate_index_events_total", kind="removed") > BLOCKS

        endpoint = f"tcp://127.0.0.1:{hybrid_engine.launch.kv_replay_port}"
        held, kinds = await asyncio.to_thread(replayed, endpoint)
        ledger = ledger_of(gateway)
        assert kinds == GROUPS
        for group in GROUPS:
            assert ledger.engine_hashes(Tier.DEVICE, group) == held[group]
        assert gateway.core.sources.trust(HOLDER) is Trust.EXACT
    with capsys.disabled():
        print(
            f"\n{len(outcomes)} prompts, {len(hits)} with reuse, all as predicted; in {windowed} the"
            f" windows allowed less than full attention; blocks held in each group:"
            f" {[len(held[group]) for group in sorted(held)]}"
        )
