"""The scheduler of a simulated engine: steps, times and tokens, one rule per test."""

import dataclasses

import pytest

from moongate.simulator.blocks import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheNamespace,
)
from moongate.simulator.engine import (
    EngineModel,
    EngineRequest,
    FinishReason,
    StepResult,
)

from .builders import PROFILE, request, step


def make_engine(**changes: float) -> EngineModel:
    return EngineModel(dataclasses.replace(PROFILE, **changes))  # type: ignore[arg-type]


def run(engine: EngineModel, now: float = 0.0) -> tuple[dict[str, list[int]], float]:
    """Step until idle; return the sampled tokens per request, and when the last step ends."""
    answers: dict[str, list[int]] = {}
    while (result := engine.step(now)) is not None:
        now = result.ends_at
        for output in result.outputs:
            answers.setdefault(output.request_id, []).append(output.token_id)
    return answers, now


def names(result: StepResult) -> list[str]:
    return [output.request_id for output in result.outputs]


# -- time ---------------------------------------------------------------------------------------


def test_an_idle_engine_has_no_step() -> None:
    assert make_engine().step(0.0) is None


def test_a_prefill_step_lasts_overhead_plus_prompt_tokens() -> None:
    engine = make_engine()
    engine.submit(request("a", 8), now=5.0)
    assert step(engine, 5.0).ends_at == pytest.approx(5.018)


def test_a_decode_step_lasts_one_token_however_many_requests_decode() -> None:
    engine = make_engine()
    engine.submit(request("a", 4, max_tokens=2), now=0.0)
    engine.submit(request("b", 4, max_tokens=2, first=50), now=0.0)
    first = step(engine)
    second = step(engine, first.ends_at)
    assert second.decode_tokens == 2
    assert second.ends_at - first.ends_at == pytest.approx(0.110)


def test_a_known_answer_is_what_is_sampled_and_ends_where_it_ends() -> None:
    engine = make_engine()
    known = dataclasses.replace(
        request("a", 5, max_tokens=9), answer_token_ids=(7, 8, 9), stop_after_tokens=3
    )
    engine.submit(known, 0.0)
    assert run(engine)[0] == {"a": [7, 8, 9]}


def test_blocks_of_a_known_answer_are_those_of_the_next_prompt() -> None:
    engine = make_engine()
    first = dataclasses.replace(
        request("a", 5), answer_token_ids=(5, 6, 7, 8), stop_after_tokens=4, max_tokens=9
    )
    engine.submit(first, 0.0)
    _, now = run(engine)
    engine.submit(request("b", 12), now)  # 0 to 11: the prompt, the answer and more
    outputs = step(engine, now).outputs
    assert outputs[0].cached_tokens == 8


def test_prefill_beside_decode_adds_up() -> None:
    engine = make_engine()
    engine.submit(request("a", 4, max_tokens=3), now=0.0)
    start = step(engine).ends_at
    engine.submit(request("b", 8, first=50), now=start)
    mixed = step(engine, start)
    assert (mixed.prefill_tokens, mixed.decode_tokens) == (8, 1)
    assert mixed.ends_at - start == pytest.approx(0.118)


def test_reused_tokens_cost_no_time() -> None:
    engine = make_engine()
    engine.submit(request("a", 9), now=0.0)
    _, now = run(engine)
    engine.submit(request("b", 9), now=now)
    warm = step(engine, now)
    assert warm.prefill_tokens == 1
    assert warm.outputs[0].cached_tokens == 8


# -- batching -----------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = make_engine()
    engine.submit(request("a", 35), now=0.0)
    sizes, now = [], 0.0
    while (result := engine.step(now)) is not None:
        sizes.append((result.prefill_tokens, len(result.outputs)))
        now = result.ends_at
    assert sizes == [(16, 0), (16, 0), (3, 1)]


def test_running_requests_are_served_before_waiting_ones() -> None:
    engine = make_engine()
    engine.submit(request("a", 4, max_tokens=3), now=0.0)
    now = step(engine).ends_at
    engine.submit(request("b", 20, first=50), now=now)
    mixed = step(engine, now)
    assert (mixed.decode_tokens, mixed.prefill_tokens) == (1, 15)  # b gets what a leaves of 16


def test_waiting_requests_are_admitted_first_come_first_served() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    for name, first in (("a", 0), ("b", 50), ("c", 100)):
        engine.submit(request(name, 4, first=first), now=0.0)
    result = step(engine)
    assert names(result) == ["a", "b"]
    assert names(step(engine, result.ends_at)) == ["c"]


def test_no_more_than_max_num_seqs_run() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(request("a", 4), now=0.0)
    engine.submit(request("b", 4, first=50), now=0.0)
    assert names(step(engine)) == ["a"]
    assert engine.statistics().waiting_requests == 1


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    engine = make_engine()  # 10 usable blocks
    engine.submit(request("a", 24, max_tokens=9), now=0.0)  # 6 blocks
    engine.submit(request("b", 20, first=50), now=0.0)  # 5 blocks: its first chunk alone would fit
    result = step(engine)
    assert engine.statistics().running_requests == 1
    assert result.prefill_tokens == 16
    assert step(engine, result.ends_at).prefill_tokens == 8


def test_a_later_request_of_the_same_step_reuses_what_an_earlier_one_just_scheduled() -> None:
    engine = make_engine()
    engine.submit(request("a", 9), now=0.0)
    engine.submit(request("b", 9), now=0.0)
    result = step(engine)
    assert result.prefill_tokens == 10
    assert [output.cached_tokens for output in result.outputs] == [0, 8]


# -- preemption ---------------------------------------------------------------------------------


def start_two_that_outgrow_the_pool() -> tuple[EngineModel, float]:
    """a and b hold 2 of 4 blocks each, full to the last token; both want a third block next."""
    engine = make_engine(blocks=5, max_model_len_tokens=16)
    engine.submit(request("a", 8, max_tokens=4), now=0.0)
    engine.submit(request("b", 8, max_tokens=4, first=50), now=0.0)
    return engine, step(engine).ends_at


def test_the_last_running_request_is_preempted_when_blocks_run_out() -> None:
    engine, now = start_two_that_outgrow_the_pool()
    assert names(step(engine, now)) == ["a"]
    statistics = engine.statistics()
    assert (statistics.running_requests, statistics.waiting_requests) == (1, 1)
    assert statistics.preemptions == 1


def test_a_preempted_request_continues_its_answer() -> None:
    alone = make_engine()
    alone.submit(request("b", 8, max_tokens=4, first=50), now=0.0)
    engine, now = start_two_that_outgrow_the_pool()
    preempted, _ = run(engine, now)
    assert preempted["b"] == run(alone)[0]["b"][1:]  # its first token came before


def test_a_preempted_request_recomputes_what_was_evicted() -> None:
    engine, now = start_two_that_outgrow_the_pool()
    prefill_tokens = 0
    while (result := engine.step(now)) is not None:
        prefill_tokens += result.prefill_tokens
        now = result.ends_at
    assert prefill_tokens == 5  # b has 9 tokens; its first block survived


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    engine, now = start_two_that_outgrow_the_pool()
    seen = set()
    while (result := engine.step(now)) is not None:
        seen |= {output.cached_tokens for output in result.outputs}
        now = result.ends_at
    assert seen == {0}
    assert engine.statistics().prefix_queries_tokens == 16


# -- endings ------------------------------------------------------------------------------------


def test_max_tokens_ends_an_answer_by_length() -> None:
    engine = make_engine()
    engine.submit(request("a", 4, max_tokens=1), now=0.0)
    assert step(engine).outputs[0].finish_reason is FinishReason.LENGTH
    assert engine.statistics().running_requests == 0


def test_an_answer_that_ends_by_itself_stops() -> None:
    engine = make_engine()
    engine.submit(dataclasses.replace(request("a", 4, 9), stop_after_tokens=2), now=0.0)
    first = step(engine)
    second = step(engine, first.ends_at)
    assert first.outputs[0].finish_reason is None
    assert second.outputs[0].finish_reason is FinishReason.STOP


def test_the_models_length_ends_an_answer() -> None:
    engine = make_engine(max_model_len_tokens=6)
    engine.submit(request("a", 4, max_tokens=100), now=0.0)
    answers, _ = run(engine)
    assert len(answers["a"]) == 2


def test_cancelling_a_running_request_frees_its_blocks() -> None:
    engine = make_engine()
    engine.submit(request("a", 8, max_tokens=9), now=0.0)
    now = step(engine).ends_at
    assert engine.pool.usage == pytest.approx(0.2)
    assert engine.cancel("a", now)
    assert engine.pool.usage == 0.0
    assert engine.step(now) is None


def test_cancelling_a_waiting_request_forgets_it() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit(request("a", 4), now=0.0)
    engine.submit(request("b", 4, first=50), now=0.0)
    now = step(engine).ends_at
    assert engine.cancel("b", now)
    assert engine.step(now) is None


def test_cancelling_a_finished_request_does_nothing() -> None:
    engine = make_engine()
    engine.submit(request("a", 4), now=0.0)
    _, now = run(engine)
    assert not engine.cancel("a", now)
    finished = {"length": 1, "stop": 0, "abort": 0, "error": 0}
    assert engine.statistics().finished_requests == finished


# -- answers ------------------------------------------------------------------------------------


def answer(engine_request: EngineRequest) -> list[int]:
    engine = make_engine()
    engine.submit(engine_request, now=0.0)
    return run(engine)[0][engine_request.request_id]


def test_the_same_prompt_gets_the_same_answer() -> None:
    assert answer(request("a", 9, 5)) == answer(request("b", 9, 5))


def test_one_other_token_in_the_tail_gets_another_answer() -> None:
    assert answer(EngineRequest("a", (1, 2, 3, 4, 5), 5)) != answer(
        EngineRequest("a", (1, 2, 3, 4, 6), 5)
    )


def test_another_choice_gets_another_answer() -> None:
    one = request("a", 9, 5)
    assert answer(one) != answer(dataclasses.replace(one, choice=1))


def test_another_salt_reuses_nothing() -> None:
    engine = make_engine()
    engine.submit(request("a", 9), now=0.0)
    _, now = run(engine)
    salted = dataclasses.replace(request("b", 9), namespace=CacheNamespace(cache_salt="s"))
    engine.submit(salted, now=now)
    assert step(engine, now).outputs[0].cached_tokens == 0


# -- events -------------------------------------------------------------------------------------


def test_a_step_reports_the_blocks_that_it_filled() -> None:
    engine = make_engine()
    engine.submit(request("a", 7, max_tokens=3), now=0.0)
    first = step(engine)
    second = step(engine, first.ends_at)
    third = step(engine, second.ends_at)
    stored = first.events + second.events + third.events
    assert all(isinstance(event, BlockStored) for event in stored)
    assert [event.token_ids for event in stored if isinstance(event, BlockStored)] == [
        (0, 1, 2, 3),
        (4, 5, 6, first.outputs[0].token_id),
    ]
    assert second.events  # the eighth token was sampled by the first step, computed by the second


def test_the_last_sampled_token_fills_no_block() -> None:
    engine = make_engine()
    engine.submit(request("a", 7, max_tokens=1), now=0.0)
    result = step(engine)
    assert [len(event.digests) for event in result.events if isinstance(event, BlockStored)] == [1]
    assert engine.step(result.ends_at) is None


def test_an_eviction_is_reported_before_the_block_that_replaces_it() -> None:
    engine = make_engine(blocks=3, max_model_len_tokens=8)
    engine.submit(request("a", 7), now=0.0)
    _, now = run(engine)
    engine.submit(request("b", 7, first=50), now=now)
    kinds = [type(event) for event in step(engine, now).events]
    assert kinds == [BlockRemoved, BlockStored]


def test_a_reset_is_told_with_the_next_step() -> None:
    engine = make_engine()
    engine.submit(request("a", 9), now=0.0)
    _, now = run(engine)
    assert engine.reset_prefix_cache()
    assert engine.step(now) is None
    engine.submit(request("b", 9), now=now)
    result = step(engine, now)
    assert result.events[0] == AllBlocksCleared()
    assert result.outputs[0].cached_tokens == 0


def test_a_reset_is_refused_while_a_request_runs() -> None:
    engine = make_engine()
    engine.submit(request("a", 9, max_tokens=2), now=0.0)
    step(engine)
    assert not engine.reset_prefix_cache()


# -- what it shows, and what it refuses -----------------------------------------------------------


def test_statistics_count_tokens() -> None:
    engine = make_engine()
    engine.submit(request("a", 9, max_tokens=2), now=0.0)
    _, now = run(engine)
    engine.submit(request("b", 9, max_tokens=1), now=now)
    run(engine, now)
    statistics = engine.statistics()
    assert (statistics.prefix_queries_tokens, statistics.prefix_hits_tokens) == (18, 8)
    assert (statistics.prompt_tokens, statistics.generation_tokens) == (18, 3)


def test_time_runs_forward_only() -> None:
    engine = make_engine()
    engine.step(2.0)
    with pytest.raises(AssertionError):
        engine.submit(request("a", 4), now=1.0)


def test_a_step_starts_when_the_last_one_is_over() -> None:
    engine = make_engine()
    engine.submit(request("a", 4, max_tokens=2), now=0.0)
    step(engine)
    with pytest.raises(AssertionError):
        engine.step(0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": 10}, "hold 36 tokens"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s must be more than 0"),
        ({"max_num_seqs": -1}, "max_num_seqs must be more than 0"),
        ({"step_overhead_ms": -1.0}, "step_overhead_ms must not be negative"),
    ],
)
def test_an_impossible_profile_is_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**changes)
