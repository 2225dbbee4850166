"""Pydantic AI: an OpenAI provider with a base_url, and a memory of messages."""
# mypy: ignore-errors

import os

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
model = openai.OpenAI(base_url=f"{url}/v1", api_key="unused").models.list().data[0].id
provider = OpenAIProvider(base_url=f"{url}/v1", api_key="unused")
agent = Agent(
    OpenAIChatModel(model, provider=provider),
    system_prompt="Be brief.",
    model_settings={"max_tokens": 64},
)

history = []
for question in ("What is a prefix cache?", "And who evicts from it?"):
    run = agent.run_sync(question, message_history=history)
    history = run.all_messages()
    print(run.output, run.usage, sep="\n")
