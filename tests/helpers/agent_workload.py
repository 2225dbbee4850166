"""Agent sessions against a live gateway, and what came of each turn.

Sessions share a system prompt, resend their whole history each turn, get tool results of varying
length, and some fork: two continuations of one history. No session key of any kind is sent. All
text is made from a seed, so two runs with one seed send the same bytes up to the model's answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from moongate.engine_plugins.vllm_render import ModelRenderer

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a run. Lengths in tokens of the model."""

    model: str
    seed: int
    sessions: int = 16
    turns: int = 10
    concurrency: int = 4
    system_tokens: int = 2000
    tool_tokens: tuple[int, int] = (50, 800)
    answer_tokens: int = 24
    pause_s: float = 0.05
    fork_at: int = 5  # every other session continues twice after this turn; 0: none does


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as the client saw it. `ideal_tokens`: all full blocks of the turn before it."""

    session: str
    number: int  # from 1; a fork counts on
    instance: str
    reason: str
    status: int
    prompt_tokens: int
    predicted_tokens: int
    cached_tokens: int
    ideal_tokens: int
    began_at: float  # of the monotonic clock
    first_token_s: float
    error: str | None = None
    is_complete: bool = True

    @property
    def is_continuation(self) -> bool:
        return self.number > 1


@dataclass(slots=True)
class Words:
    """Text of an exact number of tokens, different at each call, from one seed."""

    renderer: ModelRenderer
    chance: random.Random
    vocabulary: Sequence[str] = field(
        default_factory=lambda: [
            "".join(letters) for letters in itertools.product("bdfgklmnprst", "aeiou", "lnrst")
        ]
    )

    def text(self, tokens: int) -> str:
        """Return words of about so many tokens: never more, at most a few fewer."""
        words = " ".join(self.chance.choice(self.vocabulary) for _ in range(tokens))
        ids = self.renderer.encode(words, add_special_tokens=False)[:tokens]
        return self.renderer.decode(ids)


async def run_workload(
    url: str, model_directory: Path, workload: Workload, block_size_tokens: int
) -> list[Turn]:
    """Run all sessions, at most `concurrency` at a time, and return every turn."""
    renderer = ModelRenderer.load(model_directory)
    words = Words(renderer, random.Random(workload.seed))
    system = {"role": "system", "content": words.text(workload.system_tokens)}
    runner = _Runner(url, workload, block_size_tokens)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False, limits=limits) as c:
        gate = asyncio.Semaphore(workload.concurrency)

        async def session(number: int) -> list[Turn]:
            own = Words(renderer, random.Random(f"{workload.seed}/{number}"))
            async with gate:
                return await runner.run_session(c, f"s{number:02d}", [system], own, 1, 0)

        results = await asyncio.gather(*(session(n) for n in range(workload.sessions)))
    return [turn for turns in results for turn in turns]


class _Runner:
    def __init__(self, url: str, workload: Workload, block_size_tokens: int) -> None:
        self._workload = workload
        self._block = block_size_tokens

    async def run_session(
        self,
        client: httpx.AsyncClient,
        name: str,
        messages: Messages,
        words: Words,
        first: int,
        previous_tokens: int,
    ) -> list[Turn]:
        w = self._workload
        turns: list[Turn] = []
        messages = [*messages]
        for number in range(first, w.turns + 1):
            messages.append(self._next_message(number, words))
            turn, answer = await self._take_turn(client, name, number, messages, previous_tokens)
            turns.append(turn)
            messages.append({"role": "assistant", "content": answer})
            previous_tokens = turn.prompt_tokens
            await asyncio.sleep(w.pause_s)
            if number == w.fork_at and int(name[1:3]) % 2 == 0 and len(name) == 3:
                fork = self.run_session(
                    client, f"{name}f", messages, words, number + 1, previous_tokens
                )
                own = self.run_session(
                    client, f"{name}o", messages, words, number + 1, previous_tokens
                )
                for more in await asyncio.gather(fork, own):
                    turns += more
                return turns
        return turns

    def _next_message(self, number: int, words: Words) -> dict[str, Any]:
        length = words.chance.randint(*self._workload.tool_tokens)
        if number == 1:
            return {"role": "user", "content": words.text(length)}
        return {"role": "tool", "tool_call_id": f"call_{number}", "content": words.text(length)}

    async def _take_turn(
        self,
        client: httpx.AsyncClient,
        name: str,
        number: int,
        messages: Messages,
        previous_tokens: int,
    ) -> tuple[Turn, str]:
        body = {
            "model": self._workload.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": self._workload.answer_tokens,
            "temperature": 0,
        }
        began = asyncio.get_running_loop().time()
        first_token_s = 0.0
        usage: dict[str, Any] = {}
        error: str | None = None
        text: list[str] = []
        is_complete = False
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                error = (await answer.aread()).decode()
            else:
                async for event in _events(answer):
                    if not first_token_s:
                        first_token_s = asyncio.get_running_loop().time() - began
                    is_complete = is_complete or event == "[DONE]"
                    if event == "[DONE]":
                        continue
                    value = json.loads(event)
                    error = json.dumps(value["error"]) if "error" in value else error
                    usage = value.get("usage") or usage
                    text += [c["delta"].get("content") or "" for c in value.get("choices", ())]
        prompt_tokens = usage.get("prompt_tokens", 0)
        details = usage.get("prompt_tokens_details") or {}
        previous_blocks = previous_tokens // self._block
        usable_blocks = max(prompt_tokens - 1, 0) // self._block
        turn = Turn(
            session=name,
            number=number,
            instance=answer.headers.get("x-moongate-instance", ""),
            reason=answer.headers.get("x-moongate-reason", ""),
            status=answer.status_code,
            prompt_tokens=prompt_tokens,
            predicted_tokens=int(answer.headers.get("x-moongate-device-tokens", 0)),
            cached_tokens=details.get("cached_tokens") or 0,
            ideal_tokens=min(previous_blocks, usable_blocks) * self._block,
            began_at=began,
            first_token_s=first_token_s,
            error=error,
            is_complete=is_complete,
        )
        return turn, "".join(text)


async def _events(answer: httpx.Response) -> Any:
    async for line in answer.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run delivered, over the turns after a session's first."""

    turns: int
    reused_share_of_ideal: float
    exact_predictions: float
    device_prefix_share: float
    largest_instance_share: float  # over all turns
    first_token_s_median: float

    def __str__(self) -> str:
        return (
            f"{self.turns} turns after the first: reused {self.reused_share_of_ideal:.3f} of the "
            f"ideal, predictions exact {self.exact_predictions:.3f}, device_prefix "
            f"{self.device_prefix_share:.3f}, busiest instance {self.largest_instance_share:.2f}, "
            f"first token {self.first_token_s_median:.3f} s at the median"
        )


def summarise(turns: Sequence[Turn]) -> Summary:
    later = [turn for turn in turns if turn.is_continuation]
    by_instance = {t.instance: sum(u.instance == t.instance for u in turns) for t in turns}
    # What is reused beyond the ideal (blocks of the answer) does not make up for what is not.
    reused = sum(min(turn.cached_tokens, turn.ideal_tokens) for turn in later)
    return Summary(
        turns=len(later),
        reused_share_of_ideal=reused / sum(turn.ideal_tokens for turn in later),
        exact_predictions=sum(t.predicted_tokens == t.cached_tokens for t in later) / len(later),
        device_prefix_share=sum(t.reason == "device_prefix" for t in later) / len(later),
        largest_instance_share=max(by_instance.values()) / len(turns),
        first_token_s_median=sorted(t.first_token_s for t in later)[len(later) // 2],
    )


def inexact(turns: Sequence[Turn]) -> Iterator[str]:
    """Describe the turns whose predicted and delivered reuse differ."""
    for turn in turns:
        if turn.is_continuation and turn.predicted_tokens != turn.cached_tokens:
            yield (
                f"{turn.session} turn {turn.number} on {turn.instance}: predicted "
                f"{turn.predicted_tokens}, cached {turn.cached_tokens} of {turn.prompt_tokens}, "
                f"ideal {turn.ideal_tokens}, {turn.reason}"
            )
