"""Recorded prompts become branches that share exactly what their ids say."""

from __future__ import annotations

import itertools
import random

import pytest

from moongate.loadtest.traces import TraceConversation, TraceRequest
from moongate.router.model import BlockHash, BlockSpace
from moongate.simulator.content import Branch, Library
from moongate.simulator.conversations import Stage, from_traces


def conversation(name: str, *prompts: list[int], out: int = 1) -> TraceConversation:
    requests = [TraceRequest(len(p) * 4 + 1, out, p, 0.0, 5.0, None) for p in prompts]
    return TraceConversation(name, 4, requests, None)


def chains(*conversations: TraceConversation) -> list[list[BlockHash]]:
    workload = from_traces("t", conversations, prompt_tokens_max=10_000, gap_s_max=60)
    stage = Stage(workload)
    found: list[list[BlockHash]] = []
    for script in workload.scripts:
        play = stage.play(script)
        found += [play.branch(t).chain(t.prompt_tokens // 4, BlockSpace(4)) for t in script.turns]
    return found


def test_prompts_share_as_far_as_their_ids_agree() -> None:
    first, grown, forked, other = chains(
        conversation("a", [1, 2, 3], [1, 2, 3, 4], [1, 2, 7, 8]), conversation("b", [1, 2, 9])
    )
    assert grown[:3] == first
    assert forked[:2] == first[:2]
    assert forked[2] != first[2]
    assert other[:2] == first[:2]
    assert len({*grown, *forked, *other}) == 4 + 2 + 1


def test_a_second_play_shares_only_what_others_share() -> None:
    told = conversation("a", [1, 2, 3]), conversation("b", [1, 5])
    workload = from_traces("t", told, prompt_tokens_max=10_000, gap_s_max=60)
    stage, script = Stage(workload), workload.scripts[0]
    once, again = (
        stage.play(script).branch(script.turns[0]).chain(3, BlockSpace(4)) for _ in range(2)
    )
    assert once[:1] == again[:1]
    assert once[1] != again[1]


def test_an_answer_that_is_sent_again_is_on_the_next_prompts_line() -> None:
    told = conversation("a", [1, 2], [1, 2, 3, 4], out=8)
    workload = from_traces("t", [told], prompt_tokens_max=10_000, gap_s_max=60)
    first, second = workload.scripts[0].turns
    assert first.line == second.line or workload.lines[second.line].parent == first.line


def test_a_conversation_ends_before_a_prompt_that_is_too_long_and_gaps_are_cut() -> None:
    told = conversation("a", [1], [1, 2], [1, 2, 3], [1])
    workload = from_traces("t", [told], prompt_tokens_max=9, gap_s_max=2.0)
    assert [turn.gap_s for turn in workload.scripts[0].turns] == [0.0, 2.0]


def test_nothing_to_play_is_an_error() -> None:
    with pytest.raises(ValueError, match="at most 1 tokens"):
        from_traces("t", [conversation("a", [1])], prompt_tokens_max=1, gap_s_max=1)


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_of_prompts_shares_as_its_ids(seed: int) -> None:
    chance, ids = random.Random(seed), itertools.count(1)
    prompts = [[next(ids) for _ in range(3)]]
    for _ in range(15):
        origin = chance.choice(prompts)
        kept = origin[: chance.randint(1, len(origin))]
        prompts.append(kept + [next(ids) for _ in range(chance.randint(0, 3))])
    told = [conversation(str(n), *prompts[n::3]) for n in range(3)]
    found = chains(*told)
    flat = [p for n in range(3) for p in prompts[n::3]]
    for (a, chain_a), (b, chain_b) in itertools.combinations(zip(flat, found, strict=True), 2):
        assert common(chain_a, chain_b) == common(a, b)


def common(one: list, other: list) -> int:  # type: ignore[type-arg]
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_a_branch_knows_whose_each_block_is() -> None:
    library = Library()
    trunk = library.branch()
    limb = library.branch(trunk, 5)
    twig = library.branch(limb, 3)  # leaves where the trunk still has the blocks
    assert twig.parent is trunk
    assert list(limb.parts(2, 8)) == [(trunk, 2, 5), (limb, 5, 8)]
    assert limb.name(4) == trunk.name(4) != limb.name(5)
    assert isinstance(limb.owner(1), Branch)
