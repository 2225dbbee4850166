"""The engine model of the fleet in virtual time against a real engine: what is reused, and how long it takes."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from processes import BLOCK_TOKENS, EngineProcess, running

from moongate.simulator.batching import Batcher, EngineShape, Job
from moongate.simulator.calibration import Prefill, fit_timing
from moongate.simulator.content import Branch, Library
from moongate.simulator.step_timing import StepTiming

BLOCKS = 160  # room for about 5,000 tokens, so that most is evicted before it is wanted again
REQUESTS = 500
ANSWER_TOKENS = 8
PROMPT_TOKENS_MAX = 2_400
VOCABULARY = range(10, 4000)


@pytest.fixture(scope="module")
def small_engine(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    engine = EngineProcess.make(
        tiny_model,
        tmp_path_factory.mktemp("likeness"),
        "likeness",
        gpu_blocks_override=BLOCKS,
        max_model_len_tokens=4096,
    )
    with running(engine):
        yield engine


@dataclass
class Conversation:
    """Tokens so far, and the branch that stands for them."""

    branch: Branch
    tokens: list[int] = field(default_factory=list)


@dataclass
class Conversations:
    """Conversations that grow, fork, and are asked again; answers are sent again, or not."""

    chance: random.Random
    library: Library = field(default_factory=Library)
    all: list[Conversation] = field(default_factory=list)

    def next(self) -> Conversation:
        """Return the conversation whose turn it is, with its new prompt."""
        kind = self.chance.random()
        usable = [c for c in self.all[-12:] if len(c.tokens) < PROMPT_TOKENS_MAX - 500]
        if kind < 0.2 or not usable:
            found = Conversation(self.library.branch())
            self.all.append(found)
        elif kind < 0.4:
            origin = self.chance.choice(usable)
            blocks = self.chance.randint(0, len(origin.tokens) // BLOCK_TOKENS)
            branch = self.library.branch(origin.branch, blocks)
            found = Conversation(branch, origin.tokens[: blocks * BLOCK_TOKENS])
            self.all.append(found)
        else:
            found = self.chance.choice(usable)
        found.tokens += self.chance.choices(VOCABULARY, k=self.chance.randint(20, 500))
        return found

    def answered(self, conversation: Conversation, answer: list[int]) -> Branch:
        """Take in an answer, and return the branch on which it lies."""
        if self.chance.random() < 0.5:
            conversation.tokens += answer
            return conversation.branch
        full = len(conversation.tokens) // BLOCK_TOKENS  # the next prompt goes on otherwise
        return self.library.branch(conversation.branch, full)


@dataclass
class Asked:
    """One request at both."""

    prompt_tokens: int
    cached_tokens: int
    modelled_tokens: int
    ttft_s: float


def ask(client: httpx.Client, prompt: list[int]) -> tuple[list[int], int, float]:
    """Return the answer's tokens, the cached tokens by the engine's report, and the time to the first."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer: list[int] = []
    cached, first_at, began = 0, None, time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first_at = first_at or time.perf_counter()
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                answer += choice.get("token_ids") or []
            if chunk.get("usage"):
                cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    assert first_at is not None
    assert len(answer) == ANSWER_TOKENS
    return answer, cached, first_at - began


def model(batcher: Batcher, name: str, branch: Branch, prompt_tokens: int) -> int:
    """Let the model compute the same, alone, and return what it reused."""
    job = Job(name, branch, prompt_tokens, ANSWER_TOKENS)
    batcher.submit(job)
    while (stretch := batcher.begin(0.0)) is not None:
        batcher.end(stretch)
    return job.cached_tokens


@pytest.mark.timeout(300)
def test_the_model_reuses_what_the_engine_reuses_and_takes_as_long(
    small_engine: EngineProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    conversations = Conversations(random.Random(11))
    shape = EngineShape(BLOCKS - 1, BLOCK_TOKENS, StepTiming(1.0, 1.0))  # one is the null block
    batcher, asked = Batcher(shape), []
    with httpx.Client(base_url=small_engine.url, timeout=60.0, trust_env=False) as client:
        for _ in range(20):  # what an engine does only once
            ask(client, random.Random(0).choices(VOCABULARY, k=20))
        for number in range(REQUESTS):
            conversation = conversations.next()
            prompt = list(conversation.tokens)
            answer, cached, ttft_s = ask(client, prompt)
            branch = conversations.answered(conversation, answer)
            modelled = model(batcher, f"r{number}", branch, len(prompt))
            asked.append(Asked(len(prompt), cached, modelled, ttft_s))

    same = sum(one.cached_tokens == one.modelled_tokens for one in asked)
    reused = sum(one.cached_tokens > 0 for one in asked)
    halves = asked[0::2], asked[1::2]
    calibrated, scored = (
        [Prefill(o.prompt_tokens - o.cached_tokens, o.cached_tokens, o.ttft_s) for o in half]
        for half in halves
    )
    timing = fit_timing(calibrated)
    errors = sorted(abs(timing.prefill_s(p.tokens, p.reused_tokens) / p.ttft_s - 1) for p in scored)
    modelled_s = statistics.median(timing.prefill_s(p.tokens, p.reused_tokens) for p in scored)
    measured_s = statistics.median(p.ttft_s for p in scored)
    with capsys.disabled():
        print(
            f"\ncached tokens equal in {same} of {REQUESTS} ({reused} reused something); first token "
            f"after {measured_s * 1e3:.1f} ms, modelled {modelled_s * 1e3:.1f} ms; error of a request "
            f"{statistics.median(errors):.1%} at the median, {errors[int(len(errors) * 0.9)]:.1%} at "
            f"the 90th percentile; {timing}"
        )
    assert same >= 0.99 * REQUESTS
    assert 0.3 * REQUESTS < reused < REQUESTS
    assert statistics.median(errors) <= 0.2
    assert modelled_s == pytest.approx(measured_s, rel=0.2)
