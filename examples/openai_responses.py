"""openai-python, Responses that continue each other: the gateway keeps them, engines need not."""

import os

import openai

url = os.environ.get("MOONGATE_URL", "http://127.0.0.1:8000")
client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused")
model = client.models.list().data[0].id

first = client.responses.create(model=model, input="What is a KV cache?", max_output_tokens=64)
print(first.output_text)
with client.responses.stream(
    model=model, input="Who evicts from it?", previous_response_id=first.id, max_output_tokens=64
) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print("\n", stream.get_final_response().usage)
