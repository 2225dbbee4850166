"""The scheduler in jumps: small stories, and equality with the model that takes every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from moongate.simulator.batching import Batcher, EngineShape, Job, Stretch
from moongate.simulator.content import Branch, Library
from moongate.simulator.engine import EngineModel, EngineProfile, EngineRequest
from moongate.simulator.step_timing import StepTiming, Work

SIZE = 4
TIMING = StepTiming(overhead_ms=10.0, prefill_token_us=1000.0, weights_ms=100.0)
PROFILE = EngineProfile(
    blocks=61,
    block_size_tokens=SIZE,
    prefill_tokens_per_s=1000.0,
    decode_tokens_per_s=10.0,
    max_num_seqs=3,
    max_num_batched_tokens=32,
    max_model_len_tokens=200,
    step_overhead_ms=10.0,
)
SHAPE = EngineShape(60, SIZE, TIMING, sequences_max=3, batch_tokens_max=32)


def run_to_end(batcher: Batcher, now: float = 0.0) -> float:
    while (stretch := batcher.begin(now)) is not None:
        now = stretch.ends_at
        batcher.end(stretch)
    return now


def test_an_answer_alone_is_two_stretches() -> None:
    batcher = Batcher(SHAPE)
    batcher.submit(Job("a", Branch(1), 10, 5))
    prefill = batcher.begin(0.0)
    assert prefill is not None
    assert prefill.ends_at == pytest.approx(0.020)
    assert [job.id for job in batcher.end(prefill).begun] == ["a"]
    decode = batcher.begin(prefill.ends_at)
    assert decode is not None
    assert decode.steps == 4
    assert decode.ends_at == pytest.approx(0.020 + 4 * 0.110)
    ended = batcher.end(decode)
    assert [job.id for job in ended.finished] == ["a"]
    assert batcher.begin(1.0) is None


def test_a_stretch_is_cut_at_the_end_of_the_step_under_way() -> None:
    batcher = Batcher(SHAPE)
    batcher.submit(Job("a", Branch(1), 10, 50))
    prefill = batcher.begin(0.0)
    assert prefill is not None
    batcher.end(prefill)
    decode = batcher.begin(1.0)
    assert decode is not None
    assert batcher.cut(decode, 1.25)
    assert decode.steps == 3
    assert decode.ends_at == pytest.approx(1.33)


def test_contexts_that_grow_make_later_steps_longer() -> None:
    timing = StepTiming(overhead_ms=1.0, prefill_token_us=1.0, decode_context_ns=1000.0)
    work = Work(sequences=2, decode_contexts=100)
    each = [timing.step_s(work._replace(decode_contexts=100 + 2 * n)) for n in range(7)]
    assert timing.decode_s(7, work) == pytest.approx(sum(each))


def test_a_prompt_that_does_not_fit_waits_until_there_is_room() -> None:
    batcher = Batcher(EngineShape(10, SIZE, TIMING))
    batcher.submit(Job("a", Branch(1), 30, 4))
    batcher.submit(Job("b", Branch(2), 30, 1))
    stretch = batcher.begin(0.0)
    assert stretch is not None
    assert [job.id for job, _ in stretch.chunks] == ["a"]
    assert [job.id for job in batcher.waiting] == ["b"]
    batcher.end(stretch)
    run_to_end(batcher, stretch.ends_at)
    assert not batcher.waiting


def test_room_that_runs_out_preempts_the_last_and_all_are_answered() -> None:
    batcher = Batcher(EngineShape(12, SIZE, TIMING))
    jobs = [Job(name, Branch(n), 14, 20) for n, name in enumerate("ab", 1)]
    for job in jobs:
        batcher.submit(job)
    run_to_end(batcher)
    assert batcher.preemptions > 0
    assert [job.sampled for job in jobs] == [20, 20]
    assert batcher.cache.free == 12


def test_kv_from_elsewhere_is_waited_for_without_holding_up_others() -> None:
    batcher = Batcher(SHAPE, lambda job, first, last: last if job.id == "far" else first)
    far, near = Job("far", Branch(1), 21, 1), Job("near", Branch(2), 8, 1)
    batcher.submit(far)
    batcher.submit(near)
    stretch = batcher.begin(0.0)
    assert stretch is not None
    assert [job.id for job, _ in stretch.chunks] == ["near"]
    assert [job.id for job in batcher.parking] == ["far"]
    batcher.end(stretch)
    assert batcher.begin(stretch.ends_at) is None
    batcher.arrived("far")
    stretch = batcher.begin(1.0)
    assert stretch is not None
    assert stretch.work.prefill_tokens == 1
    assert (far.cached_tokens, far.external_tokens) == (20, 20)


def test_a_prefill_keeps_its_blocks_until_they_are_fetched() -> None:
    batcher = Batcher(SHAPE)
    job = Job("a", Branch(1), 40, 1, is_held=True)
    batcher.submit(job)
    run_to_end(batcher)
    assert batcher.cache.free == 50
    batcher.free(job)
    assert batcher.cache.free == 60


def test_a_crash_loses_the_cache_and_names_what_was_lost() -> None:
    batcher = Batcher(SHAPE)
    for name in "abcd":
        batcher.submit(Job(name, Branch(ord(name)), 20, 9))
    batcher.begin(0.0)
    assert {job.id for job in batcher.crash()} == set("abcd")
    assert (batcher.cache.free, batcher.cache.used) == (60, 0)


# --- against the model that takes every step ------------------------------------------------------


@dataclass
class Session:
    """A conversation for both models: its tokens, and the branch that stands for them."""

    branch: Branch
    tokens: list[int] = field(default_factory=list)


@dataclass
class Seen:
    """When a request's tokens came, and what was reused."""

    cached_tokens: int = -1
    first_at: float = 0.0
    ended_at: float = 0.0


@dataclass
class Both:
    """One history on both models, request by request."""

    chance: random.Random
    exact: EngineModel = field(default_factory=lambda: EngineModel(PROFILE))
    coarse: Batcher = field(default_factory=lambda: Batcher(SHAPE))

    def run(self, asked: list[tuple[float, Session, int, int]]) -> None:
        """Let requests (time, session, prompt tokens, answer tokens) arrive; compare all answers."""
        seen, outputs = self.run_exact(asked)
        for name, other in self.run_coarse(asked).items():
            assert other.cached_tokens == seen[name].cached_tokens, name
            assert other.first_at == pytest.approx(seen[name].first_at)
            assert other.ended_at == pytest.approx(seen[name].ended_at)
        for n, (_, session, length, _) in enumerate(asked):
            session.tokens[length:] = outputs[f"r{n}"]

    def run_exact(
        self, asked: list[tuple[float, Session, int, int]]
    ) -> tuple[dict[str, Seen], dict[str, list[int]]]:
        seen: dict[str, Seen] = {}
        outputs: dict[str, list[int]] = {}
        now, todo = asked[0][0], list(enumerate(asked))
        while True:
            while todo and todo[0][1][0] <= now:
                n, (_, session, length, answer) = todo.pop(0)
                prompt = session.tokens[:length]
                self.exact.submit(EngineRequest(f"r{n}", prompt, answer), now)
            step = self.exact.step(now)
            if step is None:
                if not todo:
                    return seen, outputs
                now = todo[0][1][0]
                continue
            now = step.ends_at
            for output in step.outputs:
                entry = seen.setdefault(output.request_id, Seen(output.cached_tokens, now))
                entry.ended_at = now
                outputs.setdefault(output.request_id, []).append(output.token_id)

    def run_coarse(self, asked: list[tuple[float, Session, int, int]]) -> dict[str, Seen]:
        seen: dict[str, Seen] = {}
        now, todo = asked[0][0], list(enumerate(asked))
        stretch: Stretch | None = None
        while todo or stretch is not None:
            if todo and (stretch is None or todo[0][1][0] < stretch.ends_at):
                n, (at, session, length, answer) = todo.pop(0)
                now = max(at, now)
                self.coarse.submit(Job(f"r{n}", session.branch, length, answer))
                if stretch is not None:
                    self.coarse.cut(stretch, now)
            elif stretch is not None:
                now = stretch.ends_at
                ended = self.coarse.end(stretch)
                stretch = None
                for job in ended.begun:
                    seen[job.id] = Seen(job.cached_tokens, now)
                for job in ended.finished:
                    seen[job.id].ended_at = now
            if stretch is None:
                stretch = self.coarse.begin(now)
        return seen


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_jumps_and_steps_come_to_the_same(seed: int, at_once: int) -> None:
    """Turns of forking conversations, one at a time or up to four; blocks run short all the time."""
    chance, library = random.Random(seed), Library()
    both = Both(chance)
    sessions = [Session(library.branch())]
    now = 0.0
    for _ in range(30):
        asked: list[tuple[float, Session, int, int]] = []
        for session in pick(chance, library, sessions, at_once):
            session.tokens += chance.choices(range(1000, 9000), k=chance.randint(1, 40))
            now += chance.uniform(0, 0.3)
            asked.append((now, session, len(session.tokens), chance.randint(1, 12)))
        both.run(asked)
        now += 1000.0


def pick(
    chance: random.Random, library: Library, sessions: list[Session], at_once: int
) -> list[Session]:
    """Return sessions of which no two share anything, unless they are asked one at a time."""
    usable = [s for s in sessions if len(s.tokens) < 110]
    if not usable or chance.random() < 0.3:
        sessions.append(Session(library.branch()))
    elif at_once == 1 and chance.random() < 0.3:
        origin = chance.choice(usable)
        fork = chance.randint(0, len(origin.tokens) // SIZE)
        made = library.branch(origin.branch, fork)
        sessions.append(Session(made, origin.tokens[: fork * SIZE]))
    else:
        return chance.sample(usable, min(len(usable), chance.randint(1, at_once)))
    return [sessions[-1]]
