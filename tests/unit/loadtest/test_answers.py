"""A streamed answer, read line by line."""

from __future__ import annotations

import json
from typing import Any

from moongate.loadtest.answers import AnswerReader


def chunk(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n"


def read(*lines: tuple[float, bytes]) -> AnswerReader:
    reader = AnswerReader()
    for now_s, line in lines:
        reader.feed(line, now_s)
    return reader


def test_the_first_token_is_the_first_with_something_in_it() -> None:
    reader = read(
        (1.0, chunk(role="assistant", content="")),
        (2.0, chunk(content="a")),
        (2.5, chunk(content="b")),
        (2.75, chunk(content=None)),
        (3.5, chunk(content="c")),
    )
    assert (reader.first_s, reader.gaps_ms, reader.text) == (2.0, [500.0, 1000.0], "abc")
    assert not reader.is_complete


def test_reasoning_and_calls_count_as_tokens_but_not_as_the_answer_s_text() -> None:
    calls = [{"index": 0, "function": {"arguments": "{"}}]
    reader = read((1.0, chunk(reasoning_content="hm")), (2.0, chunk(tool_calls=calls)))
    assert (reader.first_s, reader.gaps_ms, reader.text) == (1.0, [1000.0], "")


def test_usage_and_the_end_mark_are_read() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    data = json.dumps({"choices": [], "usage": usage}).encode()
    reader = read((1.0, b"data: " + data + b"\r\n"), (1.1, b"\n"), (1.2, b"data: [DONE]\n"))
    assert (reader.usage_tokens("prompt_tokens"), reader.cached_tokens()) == (9, 4)
    assert reader.usage_tokens("completion_tokens") is None
    assert reader.is_complete


def test_usage_without_details_tells_no_cached_tokens() -> None:
    data = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": null}}'
    assert read((1.0, data)).cached_tokens() is None


def test_errors_in_the_stream_are_kept() -> None:
    assert read((1.0, b'data: {"error": {"message": "gone"}}')).error == "{'message': 'gone'}"
    assert "not JSON" in (read((1.0, b"data: {")).error or "")
    assert "no object" in (read((1.0, b"data: 3")).error or "")
    assert read((1.0, b": a comment"), (1.0, b"event: ping")).error is None
