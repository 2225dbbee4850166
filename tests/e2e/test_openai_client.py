"""openai-python, unchanged, against real engines behind the gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pydantic
import pytest
from openai.types.responses import Response
from processes import EngineProcess, Serve, until

EnginePair = tuple[EngineProcess, EngineProcess]


@pytest.fixture
def client(engines: EnginePair, serve: Serve) -> Iterator[openai.OpenAI]:
    gateway = serve(engines)
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_openai_python_works_unchanged(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]

    message: openai.types.chat.ChatCompletionUserMessageParam = {"role": "user", "content": "hello"}
    chat = client.chat.completions.create(model="tiny", messages=[message], max_tokens=8)
    assert chat.choices[0].message.content
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 8

    stream = client.chat.completions.create(
        model="tiny",
        messages=[message],
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8

    plain = client.chat.completions.create(
        model="tiny", messages=[message], max_tokens=8, temperature=0, stream=True
    )
    assert all(chunk.choices for chunk in plain)  # nobody asked for usage

    tools = client.chat.completions.create(
        model="tiny",
        messages=[message],
        max_tokens=8,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    )
    assert tools.choices[0].finish_reason in ("length", "stop", "tool_calls")

    completion = client.completions.create(model="tiny", prompt="def f", max_tokens=4)
    assert completion.choices[0].text
    several = client.completions.create(model="tiny", prompt=["a b", "c d"], max_tokens=4)
    assert len(several.choices) == 2


def test_errors_come_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        client.embeddings.create(model="tiny", input="x")
    assert 400 <= refused.value.status_code < 500  # the model makes no embeddings

    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found"

    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[5] * 40_000, max_tokens=1)
    assert "32768" in str(too_long.value)

    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[])


def find_ended(client: openai.OpenAI, name: str) -> Response | None:
    """Return a response if it has ended."""
    told = client.responses.retrieve(name)
    return None if told.status in ("queued", "in_progress") else told


def test_responses_in_the_background_structured_and_cancelled(client: openai.OpenAI) -> None:
    queued = client.responses.create(
        model="tiny", input="x", background=True, max_output_tokens=8, temperature=0
    )
    assert queued.status == "queued"
    told = until(lambda: find_ended(client, queued.id), 30.0)
    assert told.status == "incomplete"  # at its limit
    again = client.responses.create(model="tiny", input="x", max_output_tokens=8, temperature=0)
    assert told.output_text == again.output_text

    long = client.responses.create(
        model="tiny", input="x", background=True, max_output_tokens=8000, temperature=0
    )
    assert client.responses.cancel(long.id).status == "cancelled"
    assert client.responses.retrieve(long.id).status == "cancelled"

    class Answer(pydantic.BaseModel):
        place: Literal["here", "there"]

    parsed = client.responses.parse(
        model="tiny", input="x", text_format=Answer, max_output_tokens=40, temperature=0
    )
    assert parsed.output_parsed is not None
    assert parsed.output_parsed.place in ("here", "there")
    chat = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "x"}], response_format=Answer,
        max_tokens=40, temperature=0,
    )  # fmt: skip
    assert chat.choices[0].message.parsed is not None
