"""Agents whose model chooses its tools, with the client libraries as they are, on simulated engines with a script.

Ten turns of each (`sdks/free_loops.py`, `sdks/loops_script.yaml`): after its first, every turn of a session goes
home and finds there what its predecessor has left, to the last block of what the model answered.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import openai
import pydantic
import pytest
from engine_metrics import counter
from openai.types.responses import Response
from processes import Child, until
from sdk_scripts import run_script

SDKS = Path(__file__).parent / "sdks"
BLOCK_TOKENS = 16
"""Of the simulated engines."""

SESSIONS = {"openai_agents": ["agent", "helper", "reviewer"]}
"""Of the loops that have more than one."""


class Call(NamedTuple):
    """One call of the model, as `free_loops.py` prints it."""

    session: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    instance: str
    device_tokens: int
    pool_tokens: int

    @property
    def left_tokens(self) -> int:
        """What can be reused of it: all full blocks but for the last token, which nobody computed."""
        return (self.prompt_tokens + self.answer_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def scripted(start_stack: Callable[..., Child]) -> Child:
    return start_stack("--script", str(SDKS / "loops_script.yaml"))


@pytest.mark.parametrize(
    "name",
    [
        *("openai_chat", "openai_responses", "openai_items", "anthropic_messages"),
        *("openai_agents", "langgraph_agent", "litellm_chat", "pydantic_ai_agent"),
    ],
)
def test_a_free_loop_stays_at_home(
    name: str, scripted: Child, capsys: pytest.CaptureFixture[str]
) -> None:
    fallbacks = counter(scripted.url, "moongate_route_fallback_total")
    printed = run_script(SDKS / "free_loops.py", name, scripted.url, "sim")
    calls = [Call(*row) for row in json.loads(printed.splitlines()[-1])]
    sessions = {
        session: [call for call in calls if call.session == session]
        for session in SESSIONS.get(name, ["main"])
    }
    assert sum(map(len, sessions.values())) == len(calls)
    assert len(next(iter(sessions.values()))) == 10
    for turns in sessions.values():
        for turn in turns:
            assert turn.cached_tokens == turn.device_tokens + turn.pool_tokens, turn
        for before, now in itertools.pairwise(turns):
            assert now.instance == before.instance, (before, now)
            assert now.cached_tokens >= before.left_tokens, (before, now)
            assert now.pool_tokens == 0, now
    assert counter(scripted.url, "moongate_route_fallback_total") == fallbacks
    with capsys.disabled():
        cached = sum(call.cached_tokens for call in calls)
        print(f"\n{name}: {len(calls)} calls, {cached} tokens cached as predicted", end=" ")


# --- what else openai-python can ask for ----------------------------------------------------------


@pytest.fixture
def client(scripted: Child) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="-", max_retries=0) as made:
        yield made


class Place(pydantic.BaseModel):
    name: Literal["here", "there"]
    lines: list[int] = pydantic.Field(min_length=2)
    note: str | None


def test_structured_output_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    chat = client.chat.completions.parse(
        model="sim", messages=[{"role": "user", "content": "x"}], response_format=Place
    )
    assert chat.choices[0].message.parsed is not None
    assert chat.choices[0].message.parsed.name == "here"
    response = client.responses.parse(model="sim", input="x", text_format=Place)
    assert response.output_parsed is not None
    assert len(response.output_parsed.lines) == 2
    with client.responses.stream(model="sim", input="x", text_format=Place) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_parsed == response.output_parsed


def test_a_named_tool_is_called_without_a_rule_for_it(client: openai.OpenAI) -> None:
    tool: openai.types.responses.FunctionToolParam = {
        "type": "function", "name": "place", "parameters": Place.model_json_schema(), "strict": None
    }  # fmt: skip
    for choice in ({"type": "function", "name": "place"}, "required"):
        response = client.responses.create(
            model="sim", input="x", tools=[tool], tool_choice=choice, store=False
        )  # type: ignore[call-overload]
        (call,) = response.output
        assert call.name == "place"
        Place.model_validate_json(call.arguments)


def find_ended(client: openai.OpenAI, name: str) -> Response | None:
    """Return a response if it has ended."""
    told = client.responses.retrieve(name)
    return None if told.status in ("queued", "in_progress") else told


def test_responses_in_the_background_end_or_are_cancelled(client: openai.OpenAI) -> None:
    queued = client.responses.create(
        model="sim", input="x", background=True, max_output_tokens=8, temperature=0
    )
    told = until(lambda: find_ended(client, queued.id), 30.0)
    assert told.status == "incomplete"  # at its limit
    again = client.responses.create(
        model="sim", input="go on", previous_response_id=told.id, max_output_tokens=8
    )
    assert again.previous_response_id == told.id
    long = client.responses.create(model="sim", input="x", background=True, max_output_tokens=8000)
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"
