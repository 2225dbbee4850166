"""openai-python, chat completions: set base_url, nothing else."""

import os

import openai

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
model = client.models.list().data[0].id

messages: list[openai.types.chat.ChatCompletionMessageParam] = []
for question in ("What is a prefix cache?", "And who evicts from it?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=64)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert answer.usage is not None
    print(answer.choices[0].message.content, answer.usage, sep="\n")
