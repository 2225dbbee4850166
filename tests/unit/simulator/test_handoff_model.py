"""Hand-offs in the pure model: what is held, what is waited for, and that all of it is freed."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moongate.kvpool.keys import KeyLayout
from moongate.kvpool.memory import MemoryPool
from moongate.simulator.blocks import BlockStored
from moongate.simulator.engine import (
    EngineModel,
    EngineRequest,
    FinishReason,
    StepResult,
)
from moongate.simulator.pooling import SharedPool
from moongate.simulator.transfer import Handoff, MooncakeSource, NixlSource, Receive, Send

from .builders import PROFILE, request, step

SEND = Send("t")
RECEIVE = Receive(MooncakeSource("http://h:1", "e", "t"))


def make_engine(*, recomputes: bool = False, **changes: float) -> EngineModel:
    return EngineModel(
        dataclasses.replace(PROFILE, **changes),  # type: ignore[arg-type]
        has_connector=True,
        recomputes_failed_loads=recomputes,
    )


def receiving(engine: EngineModel, name: str = "d", tokens: int = 10) -> StepResult:
    engine.submit(request(name, tokens, max_tokens=3, handoff=RECEIVE), 0.0)
    return step(engine, 0.0)


# -- the prefill engine ---------------------------------------------------------------------------


def test_a_prefill_for_a_decoder_holds_its_blocks_until_they_are_released() -> None:
    engine = make_engine()
    engine.submit(request("p", 10, handoff=SEND), 0.0)
    now = step(engine, 0.0).ends_at
    assert engine.statistics().running_requests == 0
    assert engine.held_block_ids("p") == (1, 2, 3)
    assert engine.pool.usage == pytest.approx(0.3)
    engine.release("p", now)
    assert (engine.held_block_ids("p"), engine.pool.usage) == (None, 0.0)


def test_held_blocks_are_cached_for_others() -> None:
    engine = make_engine()
    engine.submit(request("p", 10, handoff=SEND), 0.0)
    now = step(engine, 0.0).ends_at
    engine.submit(request("other", 10), now)
    assert step(engine, now).outputs[0].cached_tokens == 8
    assert not engine.reset_prefix_cache()


@pytest.mark.parametrize(
    ("handoff", "is_held"),
    [(SEND, False), (Send(None, holds_when_stopped=True), True), (None, False)],
)
def test_an_answer_that_ends_by_itself_is_held_for_nixl_only(
    handoff: Handoff | None, *, is_held: bool
) -> None:
    engine = make_engine()
    one = dataclasses.replace(request("p", 10, 9, handoff=handoff), stop_after_tokens=1)
    engine.submit(one, 0.0)
    assert step(engine, 0.0).outputs[0].finish_reason is FinishReason.STOP
    assert (engine.held_block_ids("p") is not None) == is_held


def test_a_cancelled_prefill_holds_nothing() -> None:
    engine = make_engine()
    engine.submit(request("p", 30, handoff=SEND), 0.0)
    now = step(engine, 0.0).ends_at
    engine.cancel("p", now)
    assert (engine.held_block_ids("p"), engine.pool.usage) == (None, 0.0)


# -- the decoder --------------------------------------------------------------------------------


def test_a_receive_is_asked_for_at_once_and_holds_blocks_for_the_whole_prompt() -> None:
    engine = make_engine()
    result = receiving(engine)
    assert [one.request_id for one in result.receives] == ["d"]
    assert (result.ends_at, result.outputs, result.events) == (0.0, (), ())
    assert engine.pool.usage == pytest.approx(0.3)
    assert (engine.statistics().running_requests, engine.statistics().waiting_requests) == (0, 1)
    assert engine.step(5.0) is None
    assert engine.wakes_at() is None  # nobody knows


def test_what_arrives_takes_its_time_is_cached_and_only_the_last_token_is_computed() -> None:
    engine = make_engine()
    receiving(engine)
    engine.kv_arriving("d", 1.0)
    assert engine.wakes_at() == pytest.approx(1.12)  # 3 blocks
    assert engine.step(1.1) is None
    result = step(engine, 1.12)
    assert result.prefill_tokens == 1
    assert result.outputs[0].cached_tokens == 10
    (stored,) = result.events
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == tuple(range(8))


def test_the_steps_of_others_go_on_while_a_prompt_is_on_its_way() -> None:
    engine = make_engine()
    engine.submit(request("d", 10, handoff=RECEIVE), 0.0)
    engine.submit(request("other", 5, first=50), 0.0)
    result = step(engine, 0.0)
    assert [output.request_id for output in result.outputs] == ["other"]


def test_only_what_the_device_lacks_is_received() -> None:
    engine = make_engine()
    engine.submit(request("before", 6), 0.0)
    now = step(engine, 0.0).ends_at
    engine.submit(request("d", 10, handoff=RECEIVE), now)
    step(engine, now)
    engine.kv_arriving("d", now)
    assert engine.wakes_at() == pytest.approx(now + 0.08)
    statistics = engine.statistics()
    assert (statistics.prefix_hits_tokens, statistics.external_hits_tokens) == (4, 6)
    assert statistics.external_queries_tokens == 6 + 6
    assert statistics.cached_tokens_by_source["p2p"] == 6


def test_nixls_tokens_are_counted_as_from_nowhere_known() -> None:
    engine = make_engine()
    engine.submit(request("d", 10, handoff=Receive(NixlSource("h", 1, "e", "r"))), 0.0)
    step(engine, 0.0)
    assert engine.statistics().cached_tokens_by_source["external_unspecified"] == 10


def test_a_failed_receive_ends_the_request_with_an_error() -> None:
    engine = make_engine()
    receiving(engine)
    assert engine.kv_failed("d", 1.0)
    assert engine.pool.usage == 0.0
    assert engine.statistics().finished_requests["error"] == 1
    assert not engine.cancel("d", 1.0)


def test_or_is_computed_and_not_asked_for_again() -> None:
    engine = make_engine(recomputes=True)
    receiving(engine)
    assert not engine.kv_failed("d", 1.0)
    result = step(engine, 1.0)
    assert (result.receives, result.prefill_tokens) == ((), 10)


def test_a_cancelled_receive_keeps_its_blocks_until_it_has_come_or_failed() -> None:
    engine = make_engine()
    for name, has_come in (("a", True), ("b", False)):
        engine.submit(request(name, 10, handoff=RECEIVE), 0.0)
        step(engine, 0.0)
        assert engine.cancel(name, 0.0)
        assert engine.is_loading(name)
        assert (engine.statistics().waiting_requests, engine.pool.usage > 0) == (0, True)
        if has_come:
            engine.kv_arriving(name, 0.0)
            assert engine.step(0.0) is None
            assert engine.pool.usage > 0
            engine._loading.set_arrival(name, 0.0)
            assert engine.step(0.0) is None
        else:
            assert not engine.kv_failed(name, 0.0)
        assert engine.pool.usage == 0.0


def test_a_preempted_request_is_not_received_again() -> None:
    engine = make_engine(blocks=7, max_model_len_tokens=24)
    receiving(engine, "d", tokens=12)
    engine.kv_arriving("d", 0.0)
    engine.submit(request("big", 12, 9, first=50), 0.0)
    now, receives, names = 1.0, list[EngineRequest](), set[str]()
    while (result := engine.step(now)) is not None:
        now = result.ends_at
        receives += result.receives
        names |= {output.request_id for output in result.outputs}
    assert engine.statistics().preemptions > 0
    assert (receives, names) == ([], {"d", "big"})


def test_who_preempts_itself_keeps_nobody_from_running_who_was_received() -> None:
    """The preempted request was the only one, and what was received came in that very step."""
    engine = make_engine(blocks=9, max_model_len_tokens=32)
    engine.submit(request("p", 4, 4, handoff=SEND), 0.0)
    receiving(engine, "d", tokens=13)
    now = 0.0
    while (result := engine.step(now := max(now, engine._busy_until))) is not None:
        now = result.ends_at
    engine.kv_arriving("d", now)
    engine.release("p", now)
    engine.submit(request("big", 15, 3, first=50), now)
    ended: set[str] = set()
    for _ in range(50):
        result = engine.step(now)
        if result is not None:
            now = result.ends_at
            ended |= {o.request_id for o in result.outputs if o.finish_reason is not None}
        elif (wakes_at := engine.wakes_at()) is not None:
            now = wakes_at
        else:
            break
    assert ended == {"d", "big"}


# -- invariants -----------------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=16)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from((None, SEND, RECEIVE)), PROMPTS),
        st.tuples(st.just("step"), st.none(), st.just([])),
        st.tuples(st.sampled_from(("cancel", "come", "fail", "release")), st.none(), PROMPTS),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=100)
@example(
    [
        ("submit", None, [0]),
        ("submit", SEND, [1, 0, 0, 0]),
        ("submit", RECEIVE, [1, *[0] * 12]),
        ("submit", None, [0] * 15),
    ],
    False,
    False,
)
@given(MOVES, st.booleans(), st.booleans())
def test_whatever_happens_every_block_is_free_in_the_end(
    moves: list[tuple[str, Handoff | None, list[int]]],
    recomputes: bool,
    has_pool: bool,
) -> None:
    shared = SharedPool(MemoryPool(400), KeyLayout("m"), block_bytes=40) if has_pool else None
    profile = dataclasses.replace(PROFILE, blocks=9, max_model_len_tokens=32)
    engine = EngineModel(
        profile, has_connector=True, recomputes_failed_loads=recomputes, shared_pool=shared
    )
    names, asked, held, now = list[str](), list[str](), list[str](), 0.0

    def take_step(now: float) -> float | None:
        result = engine.step(now)
        if result is None:
            return None
        asked.extend(one.request_id for one in result.receives)
        held.extend(
            output.request_id
            for output in result.outputs
            if engine.held_block_ids(output.request_id) is not None
        )
        return result.ends_at

    def settle(name: str, now: float, *, has_come: bool) -> None:
        if has_come:
            engine.kv_arriving(name, now)
        else:
            engine.kv_failed(name, now)

    for number, (move, handoff, tokens) in enumerate(moves):
        pick = len(tokens) - 1
        match move:
            case "submit":
                names.append(f"{number}")
                engine.submit(EngineRequest(names[-1], tokens, 1 + pick % 4, handoff=handoff), now)
            case "step":
                now = take_step(now) or now
            case "cancel" if names:
                engine.cancel(names[pick % len(names)], now)
            case "come" | "fail" if asked:
                settle(asked.pop(pick % len(asked)), now, has_come=move == "come")
            case "release" if held:
                engine.release(held.pop(pick % len(held)), now)
    for _ in range(1000):
        ended = take_step(now)
        if ended is not None:
            now = ended
        elif asked:
            settle(asked.pop(), now, has_come=True)
        elif held:
            engine.release(held.pop(), now)
        elif (wakes_at := engine.wakes_at()) is not None:
            now = wakes_at
        else:
            break
    statistics = engine.statistics()
    assert (statistics.running_requests, statistics.waiting_requests) == (0, 0)
    assert engine.pool.free_blocks == 8
    assert sum(statistics.finished_requests.values()) == len(names)
    assert statistics.prompt_tokens == (
        statistics.computed_prompt_tokens
        + statistics.local_prompt_tokens
        + statistics.external_prompt_tokens
    )
