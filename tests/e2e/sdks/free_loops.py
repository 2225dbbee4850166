# mypy: ignore-errors
# What it imports is in `.venv-sdks` only.
"""Agents' loops in which the model chooses its tools, with each client library: run by `.venv-sdks`.

    python free_loops.py LOOP URL MODEL

prints a JSON list of what is known of each call of the model: its session, what the engine reported (prompt,
cached and answered tokens) and what the gateway said in its headers (instance; tokens predicted to be there, and
in the pool). The loops are as users of the libraries write them; the headers are read beside them, where they send.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from typing import Literal

Told = tuple[str, int, int, int]  # session, prompt, cached and answered tokens

WORDS = ["def", "class", "return", "import", "while", "yield", "lambda", "raise", "with", "assert"]
# Each loop's prompts begin in their own way, so that none finds what another has left.
SYSTEM = f"You are a coding agent, here for {sys.argv[1]}. " + " ".join(WORDS * 30)
ALOUD = SYSTEM + " Think aloud."
TASK = "Where is the cost of a placement computed? " + " ".join(WORDS * 6)
TOKENS_MAX = 1_000

RESULT_BYTES = (300, 1_500, 2_000, 800, 1_900, 400, 1_200, 700, 300, 600, 500, 900)
LONG_RESULT_BYTES = (300, 1_500, 40_000, 800, 6_000, 400, 40_000, 700, 2_500, 1_200, 500, 900)
"""As in a recorded session of a coding agent: mostly short, some very long."""


class Tools:
    """What agents can call; each result differs from the one before."""

    def __init__(self, sizes: tuple[int, ...] = RESULT_BYTES) -> None:
        self.called: list[str] = []
        self._sizes = sizes

    def run(self, name: str, **arguments) -> str:
        self.called.append(name)
        number = len(self.called)
        lines = (f"{number}.{line} {name} {arguments} {WORDS[line % 10]}" for line in range(2_000))
        return "\n".join(lines)[: self._sizes[number % len(self._sizes)]]


PARAMETERS = {
    "look": {"place": {"enum": ["here", "there"]}},
    "grep": {"pattern": {"type": "string"}},
    "read_file": {"path": {"type": "string"}, "lines": {"type": "array"}},
}
SCHEMAS = {
    name: {"type": "object", "properties": fields, "required": [next(iter(fields))]}
    for name, fields in PARAMETERS.items()
}


# --- the clients' own loops -----------------------------------------------------------------------


def openai_chat(url: str, model: str) -> Iterable[Told]:
    """Chat completions, every second one as a stream; thoughts are sent back, as engines want it."""
    import openai

    client, tools = openai.OpenAI(base_url=f"{url}/v1", api_key="none"), Tools()
    offered = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    messages: list = [{"role": "system", "content": ALOUD}, {"role": "user", "content": TASK}]
    calls: list = [None]
    while calls:
        fields = {"model": model, "messages": messages, "max_tokens": TOKENS_MAX, "tools": offered}
        if len(messages) % 4:
            with client.chat.completions.stream(
                **fields, stream_options={"include_usage": True}
            ) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_completion()
        else:
            answer = client.chat.completions.create(**fields)
        choice, usage = answer.choices[0], answer.usage
        calls = choice.message.tool_calls or []
        assert choice.finish_reason == ("tool_calls" if calls else "stop"), choice
        yield (
            "main", usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
        )  # fmt: skip
        message = choice.message.model_dump(exclude_none=True)
        message["tool_calls"] = [
            {"id": one.id, "type": "function",
             "function": {"name": one.function.name, "arguments": one.function.arguments}}
            for one in calls
        ] or None  # fmt: skip
        messages.append({k: v for k, v in message.items() if v is not None and k != "parsed"})
        for call in calls:
            found = tools.run(call.function.name, **json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    assert len(set(tools.called)) == 3, tools.called


def _of_response(response, session: str = "main") -> Told:
    usage = response.usage
    cached = usage.input_tokens_details.cached_tokens
    return session, usage.input_tokens, cached, usage.output_tokens


OFFERED = [{"type": "function", "name": name, "parameters": s} for name, s in SCHEMAS.items()]


def openai_responses(url: str, model: str) -> Iterable[Told]:
    """Responses that continue each other, every second one as a stream."""
    import openai

    client, tools = openai.OpenAI(base_url=f"{url}/v1", api_key="none"), Tools()
    items: list = [{"role": "user", "content": TASK}]
    previous, turn = None, 0
    while items:
        fields = {
            "model": model, "instructions": ALOUD, "input": items, "tools": OFFERED,
            "max_output_tokens": TOKENS_MAX, "previous_response_id": previous,
        }  # fmt: skip
        turn += 1
        if turn % 2:
            with client.responses.stream(**fields) as stream:
                for _ in stream:
                    pass
                response = stream.get_final_response()
        else:
            response = client.responses.create(**fields)
        assert response.status == "completed", response
        assert response.previous_response_id == previous
        yield _of_response(response)
        previous = response.id
        items = [
            {"type": "function_call_output", "call_id": item.call_id,
             "output": tools.run(item.name, **json.loads(item.arguments))}
            for item in response.output if item.type == "function_call"
        ]  # fmt: skip
    assert len(set(tools.called)) == 3, tools.called
    assert response.output_text == "It's in router/cost.py."


def openai_items(url: str, model: str) -> Iterable[Told]:
    """Responses without a store, as Codex uses them: all items again each turn, results up to 40 KB."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    tools = Tools(LONG_RESULT_BYTES)
    items: list = [{"role": "user", "content": TASK}]
    outputs: list = [None]
    while outputs:
        response = client.responses.create(
            model=model, instructions=ALOUD, input=items, max_output_tokens=TOKENS_MAX, store=False,
            tools=OFFERED, prompt_cache_key="a session",
        )  # fmt: skip
        yield _of_response(response)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id,
             "output": tools.run(item.name, **json.loads(item.arguments))}
            for item in response.output if item.type == "function_call"
        ]  # fmt: skip
        items += outputs
    assert len(set(tools.called)) == 3, tools.called


def anthropic_messages(url: str, model: str) -> Iterable[Told]:
    """Messages, every second one as a stream; thoughts are sent back; results up to 40 KB."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    tools = Tools(LONG_RESULT_BYTES)
    offered = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    messages: list = [{"role": "user", "content": TASK}]
    reason = "tool_use"
    while reason == "tool_use":
        fields = {
            "model": model, "system": ALOUD, "tools": offered, "messages": messages,
            "max_tokens": TOKENS_MAX,
        }  # fmt: skip
        counted = client.messages.count_tokens(
            model=model, system=ALOUD, tools=offered, messages=messages
        )
        if len(messages) % 4 == 1:
            answer = client.messages.create(**fields)
        else:
            with client.messages.stream(**fields) as stream:
                for _ in stream:
                    pass
                answer = stream.get_final_message()
        usage, reason = answer.usage, answer.stop_reason
        cached = usage.cache_read_input_tokens or 0
        prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
        assert prompt == counted.input_tokens
        yield "main", prompt, cached, usage.output_tokens
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id,
             "content": tools.run(block.name, **block.input)}
            for block in answer.content if block.type == "tool_use"
        ]  # fmt: skip
        messages.append({"role": "user", "content": results})
    assert reason == "end_turn", reason
    assert len(set(tools.called)) == 3, tools.called


def litellm_chat(url: str, model: str) -> Iterable[Told]:
    """LiteLLM as a client, with streams."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    tools = Tools()
    offered = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in SCHEMAS.items()
    ]
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    calls: list = [None]
    while calls:
        stream = litellm.completion(
            model=f"openai/{model}", api_base=f"{url}/v1", api_key="none", messages=messages,
            max_tokens=TOKENS_MAX, stream=True, stream_options={"include_usage": True},
            tools=offered,
        )  # fmt: skip
        answer = litellm.stream_chunk_builder(list(stream), messages=messages)
        message, usage = answer.choices[0].message, answer.usage
        yield (
            "main", usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens,
            usage.completion_tokens,
        )  # fmt: skip
        messages.append(message.model_dump(exclude_none=True))
        calls = message.tool_calls or []
        for call in calls:
            found = tools.run(call.function.name, **json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    assert len(set(tools.called)) == 3, tools.called


# --- frameworks, which run the loop ---------------------------------------------------------------


def functions_of(tools: Tools) -> tuple[Callable[..., str], ...]:
    """Return the tools as functions, from which a framework makes its own."""

    def look(place: Literal["here", "there"]) -> str:
        """Look somewhere."""
        return tools.run("look", place=place)

    def grep(pattern: str) -> str:
        """Search for a text."""
        return tools.run("grep", pattern=pattern)

    def read_file(path: str) -> str:
        """Read a file."""
        return tools.run("read_file", path=path)

    return look, grep, read_file


def openai_agents(url: str, model: str) -> Iterable[Told]:
    """The Agents SDK: an agent that asks another one, and in the end hands over to a third."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    engine = agents.OpenAIResponsesModel(model=model, openai_client=client)
    settings = agents.ModelSettings(max_tokens=TOKENS_MAX)
    tools, told = Tools(), []

    class Listener(agents.RunHooks):
        async def on_llm_end(self, context, agent, response) -> None:
            told.append(_of_response(response, agent.name))

    look, grep, read_file = map(agents.function_tool, functions_of(tools))
    helper = agents.Agent(
        name="helper", instructions="You are the helper. " + SYSTEM, model=engine,
        model_settings=settings, tools=[grep, read_file],
    )  # fmt: skip
    reviewer = agents.Agent(
        name="reviewer", instructions="You are the reviewer. " + SYSTEM, model=engine,
        model_settings=settings, output_type=Literal["right", "wrong"],
    )  # fmt: skip

    @agents.function_tool
    async def ask_helper(question: str) -> str:
        """Let the helper find something."""
        run = await agents.Runner.run(helper, question, hooks=Listener())
        return run.final_output

    agent = agents.Agent(
        name="agent", instructions=SYSTEM, model=engine, model_settings=settings,
        tools=[look, grep, read_file, ask_helper], handoffs=[reviewer],
    )  # fmt: skip
    run = asyncio.run(agents.Runner.run(agent, TASK, hooks=Listener(), max_turns=20))
    assert run.last_agent.name == "reviewer"
    assert run.final_output == "right"
    assert len(set(tools.called)) == 3, tools.called
    return told


def langgraph_agent(url: str, model: str) -> Iterable[Told]:
    """A loop of LangGraph's (reason, act) over langchain-openai, with a memory."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import MemorySaver
    from langgraph.prebuilt import create_react_agent

    tools = Tools()

    llm = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=model, max_tokens=TOKENS_MAX, stream_usage=True
    )
    agent = create_react_agent(
        llm, [tool(one) for one in functions_of(tools)], prompt=SYSTEM, checkpointer=MemorySaver()
    )
    config = {"configurable": {"thread_id": "one"}}
    state = agent.invoke({"messages": [("user", TASK)]}, config)
    assert len(set(tools.called)) == 3, tools.called
    for message in state["messages"]:
        if message.type == "ai":
            usage = message.usage_metadata
            cached = usage["input_token_details"]["cache_read"]
            yield "main", usage["input_tokens"], cached, usage["output_tokens"]


def pydantic_ai_agent(url: str, model: str) -> Iterable[Told]:
    """Pydantic AI, which runs several calls of one turn side by side."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    tools = Tools()
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        OpenAIChatModel(model, provider=provider), system_prompt=SYSTEM,
        model_settings={"max_tokens": TOKENS_MAX},
    )  # fmt: skip

    for one in functions_of(tools):
        agent.tool_plain(one)
    run = agent.run_sync(TASK)
    assert run.output == "It's in router/cost.py.", run.output
    assert len(set(tools.called)) == 3, tools.called
    for message in run.all_messages():
        if message.kind == "response":
            usage = message.usage
            yield "main", usage.input_tokens, usage.cache_read_tokens, usage.output_tokens


# --- beside them ----------------------------------------------------------------------------------

INSTANCE = "x-moongate-instance"
COUNTS = ("device", "pool", "prompt")
HTTP_LIBRARIES = ("httpx", "httpx2")
Seen = list[tuple[str, int, int, int]]


def record_headers() -> Seen:
    """Return a list to which each call of the model adds its instance and what is known of its tokens."""
    seen: Seen = []
    for library in map(importlib.import_module, HTTP_LIBRARIES):
        _listen(library.Client, library.AsyncClient, seen)
    return seen


def _listen(client: type, async_client: type, seen: Seen) -> None:
    send, send_async = client.send, async_client.send

    def take(response) -> None:
        asks_model = response.request.url.path.endswith(("completions", "responses", "messages"))
        if response.request.method == "POST" and asks_model:
            counts = (int(response.headers[f"x-moongate-{name}-tokens"]) for name in COUNTS)
            seen.append((response.headers[INSTANCE], *counts))

    def send_and_take(self, *args, **kwargs):
        response = send(self, *args, **kwargs)
        take(response)
        return response

    async def send_and_take_async(self, *args, **kwargs):
        response = await send_async(self, *args, **kwargs)
        take(response)
        return response

    client.send, async_client.send = send_and_take, send_and_take_async


LOOPS: dict[str, Callable[[str, str], Iterable[Told]]] = {
    loop.__name__: loop
    for loop in (
        openai_chat, openai_responses, openai_items, anthropic_messages, openai_agents,
        langgraph_agent, litellm_chat, pydantic_ai_agent,
    )
}  # fmt: skip

if __name__ == "__main__":
    name, url, model = sys.argv[1:]
    seen = record_headers()
    told = list(LOOPS[name](url, model))
    assert len(told) == len(seen), (told, seen)
    assert [one[1] for one in told] == [prompt for *_, prompt in seen], (told, seen)
    rows = [(*one, *headers[:3]) for one, headers in zip(told, seen, strict=True)]
    print(json.dumps(rows))
