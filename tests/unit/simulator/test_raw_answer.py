"""Answers as tokens: the next prompt has the same, and parts are told when their tokens are there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from model_styles import BUILDS, STYLES

from moongate.engine_plugins.vllm_render import ModelRenderer
from moongate.simulator.answers import Answers
from moongate.simulator.engine import FinishReason, TokenOutput
from moongate.simulator.openai_wire import Choice, Delta
from moongate.simulator.raw_answer import RawAnswer, write_answer
from moongate.simulator.script import Answer, Call
from moongate.simulator.server import BUNDLED_TOKENIZER

SAID = Answer(
    reasoning="Hm é ☃: is it 'f'?",
    text="I'll look 日本.",
    calls=[
        Call(name="grep", arguments={"pattern": 'a "b" 大', "n": [1, 2]}),
        Call(name="grep", arguments={}),
    ],
)
TOOLS = [{"type": "function", "function": {"name": "grep", "parameters": {}}}]
ASKED = [{"role": "user", "content": "Hi"}]


def renderer_of(style: str, build: str) -> ModelRenderer:
    made = STYLES[style]
    return made.renderer(BUILDS[build](made.control_tokens), ModelRenderer)


def written(answer: Answer, renderer: ModelRenderer, **fields: Any) -> RawAnswer:
    ids = [f"call{n:05}" for n in range(len(answer.calls))]
    chat = {"messages": ASKED, "tools": TOOLS}
    return write_answer(
        answer, ids, renderer, chat, **{"is_forced": False, "is_named": False, **fields}
    )


def generate(raw: RawAnswer, tokens: int) -> tuple[list[Delta], Choice]:
    """Return what is told of an answer of which so many tokens are sampled."""
    answers = Answers({"r": (0, 0)}, [[1, 2]], lambda _: "", [raw])
    deltas = []
    for n, token_id in enumerate(raw.token_ids[:tokens], start=1):
        reason = None
        if n == tokens:
            reason = FinishReason.STOP if n == len(raw.token_ids) else FinishReason.LENGTH
        deltas.append(answers.add(TokenOutput("r", token_id, 0, reason)))
    return deltas, answers.choices()[0]


def joined(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return reasoning, text and calls of a stream, as its reader has them in the end."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.calls:
            if call.name is not None:
                assert call.call_id is not None
                calls[call.index] = [call.call_id, call.name, ""]
            calls[call.index][2] += call.arguments
    text = "".join(delta.text for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    return reasoning, text, [(a, b, c) for a, b, c in calls.values()]


EXPECTED_CALLS = [
    (f"call{n:05}", call.name, json.dumps(call.arguments, ensure_ascii=False))
    for n, call in enumerate(SAID.calls)
]


@pytest.mark.parametrize(
    "build", ["simulator", "byte_level", "legacy_llama", "unigram_first", "bpe_first", "word_piece"]
)
@pytest.mark.parametrize("style", STYLES)
def test_stream_and_whole_say_the_answer_whatever_the_model(style: str, build: str) -> None:
    raw = written(SAID, renderer_of(style, build))
    deltas, choice = generate(raw, len(raw.token_ids))
    assert joined(deltas) == (SAID.reasoning, SAID.text, EXPECTED_CALLS)
    assert (choice.reasoning, choice.text) == (SAID.reasoning, SAID.text)
    assert [(c.call_id, c.name, c.arguments) for c in choice.calls] == EXPECTED_CALLS
    assert choice.finish_reason == deltas[-1].finish_reason == "tool_calls"
    assert 0 < choice.reasoning_tokens < len(raw.token_ids)


@pytest.mark.parametrize(
    "answer",
    [
        SAID,
        Answer(text="Only this.\n"),
        Answer(calls=SAID.calls),
        Answer(text="Look:", calls=[Call(name="grep", arguments={"q": "grep"})]),
    ],
)
def test_the_next_prompt_has_the_answers_tokens(answer: Answer) -> None:
    renderer = ModelRenderer.load(BUNDLED_TOKENIZER)
    raw = written(answer, renderer)
    _, choice = generate(raw, len(raw.token_ids))
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning:
        message["reasoning"] = choice.reasoning
    if choice.calls:
        message["tool_calls"] = [
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in choice.calls
        ]  # fmt: skip
    before = renderer.chat_token_ids({"messages": ASKED, "tools": TOOLS})
    after = renderer.chat_token_ids({"messages": [*ASKED, message, *ASKED], "tools": TOOLS})
    told = [*before, *raw.token_ids]
    assert after[: len(told)] == told


def test_thoughts_that_the_template_leaves_out_are_said_all_the_same() -> None:
    raw = written(Answer(reasoning="Hm.", text="Yes."), renderer_of("llama_3", "byte_level"))
    assert raw.text == "<think>\nHm.\n</think>\n\nYes."


def test_what_breaks_off_in_a_call_is_text_unless_it_is_streamed() -> None:
    raw = written(SAID, ModelRenderer.load(BUNDLED_TOKENIZER))
    at = raw.text.index('"pattern"')
    tokens = next(n for n, end in enumerate(raw.ends, start=1) if end > at)
    deltas, choice = generate(raw, tokens)
    assert (choice.calls, choice.finish_reason) == ((), "length")
    assert choice.text == raw.text[raw.text_start : raw.visible(tokens)]
    _, text, calls = joined(deltas)
    assert (text, [name for _, name, _ in calls]) == (SAID.text, ["grep"])
    assert EXPECTED_CALLS[0][2].startswith(calls[0][2])


def test_calls_end_as_the_request_has_them() -> None:
    renderer = ModelRenderer.load(BUNDLED_TOKENIZER)
    only_calls = Answer(calls=SAID.calls)
    told = [
        generate(raw, len(raw.token_ids))[1]
        for raw in (
            written(only_calls, renderer),
            written(only_calls, renderer, is_forced=True),
            written(only_calls, renderer, is_forced=True, is_named=True),
        )
    ]
    assert [(choice.text, choice.finish_reason) for choice in told] == [
        (None, "tool_calls"), ("", "tool_calls"), ("", "stop"),
    ]  # fmt: skip


def test_an_answer_that_is_to_break_off_has_no_end() -> None:
    renderer = ModelRenderer.load(BUNDLED_TOKENIZER)
    whole = written(Answer(text="a b"), renderer).token_ids
    assert renderer.end_token is not None
    assert whole[-1] == renderer.end_token.id
    assert written(Answer(text="a b", finish="length"), renderer).token_ids == whole[:-1]
