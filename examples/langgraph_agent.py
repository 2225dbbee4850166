"""LangGraph over langchain-openai: an agent with a tool and a memory."""
# mypy: ignore-errors

import os

import openai
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.prebuilt import create_react_agent

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
model = openai.OpenAI(base_url=f"{url}/v1", api_key="unused").models.list().data[0].id


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return f"It is sunny in {city}."


llm = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, max_tokens=256)
agent = create_react_agent(llm, [weather], checkpointer=MemorySaver())
config = {"configurable": {"thread_id": "one"}}
for question in ("How is the weather in Oslo?", "And in Rome?"):
    state = agent.invoke({"messages": [("user", question)]}, config)
    print(state["messages"][-1].content)
