# mypy: ignore-errors
# What it imports is in `.venv-sdks` only.
"""Ten turns of an agent with each client library, as its users write them: run by `.venv-sdks`.

    python loops.py LOOP URL MODEL

prints a JSON list of what the engine reported for each call: [prompt tokens, cached tokens]. Apart from the
address, nothing here is for moongate.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Usage = list[int]  # prompt tokens, cached tokens

TURNS = 10
WORDS = ["def", "class", "return", "import", "while", "yield", "lambda", "raise", "with", "assert"]
SYSTEM = "You are a coding agent. " + " ".join(WORDS * 30)
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}},
    "required": ["place"],
    "additionalProperties": False,
}


def text(turn: int) -> str:
    """Return what the user says in a turn: different each time."""
    return " ".join(f"{word}_{turn}" for word in WORDS * 6)


def result(turn: int) -> str:
    """Return what a tool finds: under 2 KB."""
    return json.dumps({"turn": turn, "lines": [f"{turn} {word}" for word in WORDS * 8]})


# --- openai ---------------------------------------------------------------------------------------


def openai_chat(url: str, model: str) -> Iterable[Usage]:
    """Chat completions: streams, and a tool that the model has to call."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    function = {"name": "look", "description": "Look somewhere.", "parameters": SCHEMA}
    messages: list = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS // 2):
        messages.append({"role": "user", "content": text(turn)})
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=64, temperature=0,
            tools=[{"type": "function", "function": function}],
            tool_choice={"type": "function", "function": {"name": "look"}},
        )  # fmt: skip
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["place"] in ("here", "there")
        yield [answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens]
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result(turn)})
        said = ""
        stream = client.chat.completions.create(
            model=model, messages=messages, max_tokens=16, temperature=0, stream=True,
            stream_options={"include_usage": True}, tools=[{"type": "function", "function": function}],
            tool_choice="none",
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices:
                said += chunk.choices[0].delta.content or ""
            usage = chunk.usage
        yield [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens]
        messages.append({"role": "assistant", "content": said})


def _of_response(response) -> Usage:
    return [response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens]


def openai_responses(url: str, model: str) -> Iterable[Usage]:
    """Responses that continue each other, every second one as a stream."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    previous = None
    for turn in range(TURNS):
        fields = {
            "model": model, "instructions": SYSTEM, "input": text(turn), "max_output_tokens": 16,
            "temperature": 0, "previous_response_id": previous,
        }  # fmt: skip
        if turn % 2:
            with client.responses.stream(**fields) as stream:
                kinds = [event.type for event in stream]
                response = stream.get_final_response()
            assert kinds[0] == "response.created", kinds
        else:
            response = client.responses.create(**fields)
        assert response.previous_response_id == previous
        assert client.responses.retrieve(response.id).output_text == response.output_text
        previous = response.id
        yield _of_response(response)


def openai_items(url: str, model: str) -> Iterable[Usage]:
    """Responses without a store, as Codex uses them: all items are sent again each turn."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    tool = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": True}
    items: list = []
    for turn in range(TURNS // 2):
        items.append({"role": "user", "content": text(turn)})
        for choice in ({"type": "function", "name": "look"}, "none"):
            response = client.responses.create(
                model=model, instructions=SYSTEM, input=items, max_output_tokens=64, store=False,
                temperature=0, tools=[tool], tool_choice=choice, prompt_cache_key="a session",
            )  # fmt: skip
            items += [item.model_dump(exclude_none=True) for item in response.output]
            for item in response.output:
                if item.type == "function_call":
                    output = {"type": "function_call_output", "call_id": item.call_id}
                    items.append({**output, "output": result(turn)})
            yield _of_response(response)


# --- anthropic ------------------------------------------------------------------------------------


def _of_message(message) -> Usage:
    usage = message.usage
    cached, stored = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    return [usage.input_tokens + stored + cached, cached]


def anthropic_messages(url: str, model: str) -> Iterable[Usage]:
    """Messages: blocks, a tool that has to be called, streams, counted tokens."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    tool = {"name": "look", "description": "Look somewhere.", "input_schema": SCHEMA}
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages: list = []
    for turn in range(TURNS // 2):
        blocks = [{"type": "text", "text": text(turn)}]
        messages.append({"role": "user", "content": blocks})
        fields = {
            "model": model, "system": system, "tools": [tool], "messages": messages,
        }  # fmt: skip
        choice = {"type": "tool", "name": "look"}
        answer = client.messages.create(max_tokens=64, tool_choice=choice, **fields)
        use = next(block for block in answer.content if block.type == "tool_use")
        assert use.input["place"] in ("here", "there")
        assert answer.stop_reason == "tool_use", answer.stop_reason
        yield _of_message(answer)
        messages.append({"role": "assistant", "content": answer.content})
        found = {"type": "tool_result", "tool_use_id": use.id, "content": result(turn)}
        messages.append({"role": "user", "content": [found]})
        counted = client.messages.count_tokens(
            model=model, system=system, tools=[tool], messages=messages
        )
        with client.messages.stream(
            max_tokens=16, tool_choice={"type": "none"}, **fields
        ) as stream:
            said = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert said == "".join(block.text for block in final.content if block.type == "text")
        assert _of_message(final)[0] == counted.input_tokens
        yield _of_message(final)
        messages.append({"role": "assistant", "content": final.content})


# --- frameworks -----------------------------------------------------------------------------------


def openai_agents(url: str, model: str) -> Iterable[Usage]:
    """The Agents SDK: a tool loop with a sub-agent as one of the tools, and a typed answer."""
    import agents
    import openai

    @dataclass
    class Found:
        place: Literal["here", "there"]

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    engine = agents.OpenAIResponsesModel(model=model, openai_client=client)
    asked: list[str] = []
    usages: list[Usage] = []

    @agents.function_tool
    def look(place: Literal["here", "there"]) -> str:
        """Look somewhere."""
        asked.append(place)
        return result(len(asked))

    settings = agents.ModelSettings(temperature=0, max_tokens=48)
    helper = agents.Agent(
        name="helper", instructions=SYSTEM + " Help.", model=engine, model_settings=settings,
        output_type=Found,
    )  # fmt: skip

    @agents.function_tool
    async def ask_helper(place: Literal["here", "there"]) -> str:
        """Let the helper look."""
        run = await agents.Runner.run(helper, text(100) + place)
        usages.append(_of_response(run.raw_responses[0]))
        return str(run.final_output)

    agent = agents.Agent(
        name="agent", instructions=SYSTEM, model=engine, output_type=Found,
        tools=[look, ask_helper],
        model_settings=agents.ModelSettings(temperature=0, max_tokens=48, tool_choice="look"),
    )  # fmt: skip

    async def talk() -> list[Usage]:
        items: list = []
        for turn in range(TURNS // 2):
            items.append({"role": "user", "content": text(turn)})
            if turn == TURNS // 2 - 1:
                agent.model_settings.tool_choice = "ask_helper"
            run = await agents.Runner.run(agent, items, max_turns=4)
            items = run.to_input_list()
            usages.extend(map(_of_response, run.raw_responses))
        assert len(asked) == TURNS // 2 - 1, asked
        return usages

    return asyncio.run(talk())


def langgraph_agent(url: str, model: str) -> Iterable[Usage]:
    """A loop of LangGraph's (reason, act) over langchain-openai, with a memory."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import MemorySaver
    from langgraph.prebuilt import create_react_agent

    asked: list[str] = []

    @tool
    def look(place: Literal["here", "there"]) -> str:
        """Look somewhere."""
        asked.append(place)
        return result(len(asked))

    llm = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, temperature=0, max_tokens=48,
        stream_usage=True,
    )  # fmt: skip

    def choose(state, _runtime):
        """Let the model call the tool once after each thing that the user says."""
        is_users = state["messages"][-1].type == "human"
        return llm.bind_tools([look], tool_choice="look" if is_users else "none")

    agent = create_react_agent(choose, [look], prompt=SYSTEM, checkpointer=MemorySaver())
    for turn in range(TURNS // 2):
        config = {"configurable": {"thread_id": "one"}}
        state = agent.invoke({"messages": [("user", text(turn))]}, config)
        last = [m for m in state["messages"] if m.type == "ai"][-2:]
        for message in last:
            usage = message.usage_metadata
            yield [usage["input_tokens"], usage["input_token_details"]["cache_read"]]
    assert len(asked) == TURNS // 2, asked


def litellm_chat(url: str, model: str) -> Iterable[Usage]:
    """LiteLLM as a client, with streams."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    messages: list = [{"role": "system", "content": SYSTEM}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": text(turn)})
        stream = litellm.completion(
            model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", messages=messages,
            max_tokens=16, temperature=0, stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(stream)
        answer = litellm.stream_chunk_builder(chunks, messages=messages)
        usage = answer.usage
        yield [usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens]
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


def pydantic_ai_agent(url: str, model: str) -> Iterable[Usage]:
    """Pydantic AI with its memory of messages."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        OpenAIChatModel(model, provider=provider), system_prompt=SYSTEM,
        model_settings={"temperature": 0, "max_tokens": 16},
    )  # fmt: skip
    history: list = []
    for turn in range(TURNS):
        run = agent.run_sync(text(turn), message_history=history)
        history = run.all_messages()
        usage = history[-1].usage
        yield [usage.input_tokens, usage.cache_read_tokens]


LOOPS: dict[str, Callable[[str, str], Iterable[Usage]]] = {
    loop.__name__: loop
    for loop in (
        openai_chat, openai_responses, openai_items, anthropic_messages, openai_agents,
        langgraph_agent, litellm_chat, pydantic_ai_agent,
    )
}  # fmt: skip

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    print(json.dumps(list(LOOPS[name](url, model))))
