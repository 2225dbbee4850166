"""OpenAI Agents SDK, over Responses: an agent with a tool and a typed answer."""
# mypy: ignore-errors

import os
from typing import Literal

import agents
import openai

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
served = openai.OpenAI(base_url=f"{url}/v1", api_key="unused").models.list().data[0].id
model = agents.OpenAIResponsesModel(served, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-"))
settings = agents.ModelSettings(max_tokens=256, tool_choice="weather")
agents.set_tracing_disabled(True)
Sky = Literal["sunny", "rainy"]


@agents.function_tool
def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


agent = agents.Agent("me", model=model, model_settings=settings, tools=[weather], output_type=Sky)
print(agents.Runner.run_sync(agent, "How is the weather in Oslo?").final_output)
