"""LiteLLM as a client: the provider `openai`, and api_base."""
# mypy: ignore-errors

import os

import openai

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
import litellm

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
model = openai.OpenAI(base_url=f"{url}/v1", api_key="unused").models.list().data[0].id

for chunk in litellm.completion(
    model=f"openai/{model}", api_base=f"{url}/v1", api_key="unused", max_tokens=64, stream=True,
    messages=[{"role": "user", "content": "What is a prefix cache?"}],
):  # fmt: skip
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
