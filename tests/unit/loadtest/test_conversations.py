"""Conversations: the same for one seed, as long as asked for, sharing what was recorded."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from made_traces import agentic_request, write_agentic, write_growing_agentic, write_mooncake

from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.loadtest.conversations import TOOLS, Conversation, Turn, Workload, poisson_arrivals
from moongate.loadtest.settings import SHAPES, Preset, WorkloadSettings
from moongate.loadtest.traces import TraceError, TraceFormat
from moongate.loadtest.words import TokenCosts
from moongate.simulator.server import BUNDLED_TOKENIZER

RENDERER = ModelRenderer.load(BUNDLED_TOKENIZER)


def _measure_tools() -> int:
    with_tools, without = (
        len(RENDERER.chat_token_ids({"messages": [{"role": "user", "content": "act"}], **more}))
        for more in ({"tools": TOOLS}, {})
    )
    return with_tools - without


SIM_COSTS = TokenCosts(
    per_word=1.0, per_message=6, per_answer=7, per_request=5, tools=_measure_tools()
)
"""As `moongate loadtest` measures them on a simulated engine."""


def settings_for(preset: Preset, **changes: Any) -> WorkloadSettings:
    fields = {"preset": preset, "seed": 7, "shape": SHAPES[preset], "costs": SIM_COSTS, **changes}
    return WorkloadSettings(**fields)


def hold(conversation: Conversation, turns_max: int = 1000, answer: str = "yes") -> list[Turn]:
    """Take all turns, each answered by the same text. Their messages are as they were then."""
    turns: list[Turn] = []
    while len(turns) < turns_max and (turn := conversation.next_turn()) is not None:
        turns.append(turn)
        conversation.answered(answer)
    return turns


def tokens_of(turn: Turn) -> list[int]:
    return RENDERER.chat_token_ids(turn.body)


def count_tokens(turn: Turn) -> int:
    return len(tokens_of(turn))


def common_tokens(one: Turn, other: Turn) -> int:
    pairs = zip(tokens_of(one), tokens_of(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


# --- agents ---------------------------------------------------------------------------------------


def test_one_seed_gives_the_same_sessions_and_another_others() -> None:
    def bodies(seed: int) -> list[Any]:
        workload = Workload(settings_for(Preset.AGENTS, seed=seed))
        return [(t.body, t.pause_s) for _ in range(2) for t in hold(workload.begin(0.0), 4)]

    assert bodies(1) == bodies(1)
    assert bodies(1) != bodies(2)


def test_a_session_resends_its_history_and_the_answer_is_part_of_it() -> None:
    turns = hold(Workload(settings_for(Preset.AGENTS)).begin(0.0), 6, answer="so be it")
    for before, after in pairwise(turns):
        history, more = before.body["messages"], after.body["messages"]
        assert more[: len(history)] == history
        assert more[len(history)]["content"] == "so be it"
    roles = [[m["role"] for m in turn.body["messages"]] for turn in turns]
    assert roles[0] == ["system", "user"]
    assert roles[1][2:] == ["assistant", "tool"]
    assert roles[4][-1] == "user"  # each fifth turn


def test_tool_results_belong_to_calls() -> None:
    messages = hold(Workload(settings_for(Preset.AGENTS)).begin(0.0), 8)[-1].body["messages"]
    for before, message in pairwise(messages):
        if message["role"] == "tool":
            assert before["tool_calls"][0]["id"] == message["tool_call_id"]
        elif before["role"] == "assistant":
            assert "tool_calls" not in before


def test_without_tools_what_they_return_is_the_user_s() -> None:
    turns = hold(Workload(settings_for(Preset.AGENTS, has_tools=False)).begin(0.0), 4)
    assert {m["role"] for m in turns[-1].body["messages"]} == {"system", "user", "assistant"}
    assert "tools" not in turns[-1].body


def test_a_first_prompt_is_as_long_as_asked_for() -> None:
    turn = Workload(settings_for(Preset.AGENTS)).begin(0.0).next_turn()
    assert turn is not None
    assert abs(count_tokens(turn) - 12_000) <= 2


def test_sessions_share_the_system_prompt_unless_told_otherwise() -> None:
    for shares, expected in ((True, 10_000), (False, 500)):
        workload = Workload(settings_for(Preset.AGENTS, shares_system=shares))
        one, two = (hold(workload.begin(0.0), 1)[0] for _ in range(2))
        assert abs(common_tokens(one, two) - expected) <= 500


def test_a_session_ends_before_its_prompt_is_too_long() -> None:
    turns = hold(Workload(settings_for(Preset.AGENTS, context_tokens_max=20_000)).begin(0.0))
    assert all(count_tokens(turn) <= 20_000 for turn in turns)


def test_lengths_pauses_and_turns_are_as_published() -> None:
    workload = Workload(settings_for(Preset.AGENTS, context_tokens_max=10**9))
    sessions = [hold(workload.begin(0.0), 200, "w") for _ in range(60)]
    assert 25 <= statistics.median(map(len, sessions)) <= 42
    pauses = sorted(turn.pause_s for turns in sessions for turn in turns[1:])
    assert 4.5 <= statistics.median(pauses) <= 6.0
    assert max(pauses) <= 5.2 * 16
    last = [turns[-1].body["messages"][-1]["content"].count(" ") + 1 for turns in sessions]
    assert 1_500 <= statistics.mean(last) <= 3_000  # 2,242 with the answer


# --- shared prompts, bursts -----------------------------------------------------------------------


def test_questions_share_a_few_system_prompts() -> None:
    workload = Workload(settings_for(Preset.SHARED_PROMPT, shared_prompts=2))
    turns = [hold(workload.begin(0.0))[0] for _ in range(4)]
    systems = [turn.body["messages"][0]["content"] for turn in turns]
    assert systems[0] == systems[2]
    assert systems[1] == systems[3] != systems[0]
    assert len({turn.body["messages"][1]["content"] for turn in turns}) == 4
    assert abs(count_tokens(turns[0]) - 8_205) <= 2


def test_a_burst_has_a_prefix_that_none_before_had() -> None:
    workload = Workload(settings_for(Preset.COLD_BURST))
    systems = [
        hold(workload.begin(at_s))[0].body["messages"][0]["content"] for at_s in (10.0, 10.1, 20.0)
    ]
    assert systems[0] == systems[1] != systems[2]
    assert workload.starts_after_s(12.5) == 7.5


# --- traces ---------------------------------------------------------------------------------------


def trace_workload(folder: Path, **changes: Any) -> Workload:
    return Workload(settings_for(Preset.TRACE, traces=folder, **changes))


def test_a_replayed_prompt_has_the_recorded_length_and_shares_what_was_shared(
    tmp_path: Path,
) -> None:
    requests = [
        agentic_request(0.0, 1310, range(1, 21)),  # 20 blocks and 30 tokens
        agentic_request(1.0, 2010, range(1, 32)),
        agentic_request(2.0, 1500, [*range(1, 12), *range(50, 62)]),  # the history is rewritten
    ]
    write_agentic(tmp_path, "one", requests)
    turns = hold(trace_workload(tmp_path).begin(0.0))
    assert [count_tokens(turn) for turn in turns] == [1310, 2010, 1500]
    assert 20 * 64 <= common_tokens(turns[0], turns[1]) < 20 * 64 + 8
    assert 11 * 64 <= common_tokens(turns[1], turns[2]) < 11 * 64 + 8


@pytest.mark.parametrize("tokens", [1, 30, 64, 70, 520, 1024, 1030, 5000])
def test_prompts_of_any_length_end_with_the_user(tmp_path: Path, tokens: int) -> None:
    write_agentic(tmp_path, "one", [agentic_request(0.0, tokens, range(tokens // 64))], tools=0)
    (turn,) = hold(trace_workload(tmp_path).begin(0.0))
    roles = [message["role"] for message in turn.body["messages"]]
    assert roles[-1] == "user"
    assert all(before != after for before, after in pairwise(roles))
    least = 12 if tokens < 64 else tokens
    assert least <= count_tokens(turn) <= max(tokens, 12) + 19  # nothing is left of an end below


def test_conversations_of_a_trace_share_across_files_and_laps_do_not(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_agentic(tmp_path, name, [agentic_request(0.0, 394, range(1, 7))])
    workload = trace_workload(tmp_path)
    one, two, again = (hold(workload.begin(0.0))[0] for _ in range(3))
    assert 3 * 64 <= common_tokens(one, two) < 3 * 64 + 8
    assert common_tokens(one, again) < 16


def test_mooncake_prompts_share_by_global_ids(tmp_path: Path) -> None:
    write_mooncake(tmp_path, [(0, 1550, [0, 1, 2, 3]), (10, 1600, [0, 1, 9, 10])])
    workload = trace_workload(tmp_path)
    one, two = (hold(workload.begin(0.0))[0] for _ in range(2))
    assert [count_tokens(turn) for turn in (one, two)] == [1550, 1600]
    assert 1024 <= common_tokens(one, two) < 1040


def test_recorded_pauses_pass_faster_and_answers_are_cut(tmp_path: Path) -> None:
    write_growing_agentic(tmp_path, "one", turns=3)
    settings = settings_for(Preset.TRACE, traces=tmp_path, speed=10.0)
    shape = replace(settings.shape, answer_tokens=5)
    turns = hold(Workload(replace(settings, shape=shape)).begin(0.0))
    assert [turn.pause_s for turn in turns] == [0.0, 0.05, 0.05]
    assert {turn.body["max_tokens"] for turn in turns} == {5}


def test_what_is_too_long_is_left_out(tmp_path: Path) -> None:
    write_growing_agentic(tmp_path, "long", turns=2, blocks=30)
    with pytest.raises(TraceError, match="at most 1000 tokens"):
        trace_workload(tmp_path, context_tokens_max=1000).begin(0.0)
    turns = hold(trace_workload(tmp_path, context_tokens_max=2000).begin(0.0))
    assert len(turns) == 1


def test_a_format_that_is_not_there_is_said(tmp_path: Path) -> None:
    write_growing_agentic(tmp_path, "one", turns=1)
    with pytest.raises(TraceError, match="no mooncake traces there, only agentic"):
        trace_workload(tmp_path, trace_format=TraceFormat.MOONCAKE)


# --- arrivals -------------------------------------------------------------------------------------


def test_arrivals_come_at_the_rate_and_again_the_same_by_seed() -> None:
    def first(count: int) -> list[float]:
        return list(islice(poisson_arrivals(4.0, random.Random(3).random), count))

    moments = first(4000)
    assert moments == first(4000)
    assert moments == sorted(moments)
    assert 950 <= moments[-1] <= 1050
    gaps = [after - before for before, after in pairwise(moments)]
    assert abs(statistics.stdev(gaps) / statistics.mean(gaps) - 1.0) < 0.1  # as exponential ones
