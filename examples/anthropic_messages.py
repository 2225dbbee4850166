"""anthropic-python, Messages: set base_url (without /v1), nothing else."""
# mypy: ignore-errors

import os

import anthropic

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
client = anthropic.Anthropic(base_url=url, api_key="unused")
model = client.models.list().data[0].id

messages = []
for question in ("What is a prefix cache?", "And who evicts from it?"):
    messages.append({"role": "user", "content": question})
    with client.messages.stream(
        model=model, system="Be brief.", messages=messages, max_tokens=64
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        final = stream.get_final_message()
    print("\n", final.usage)
    messages.append({"role": "assistant", "content": final.content})
