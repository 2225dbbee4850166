"""Bodies and answers in the engine's JSON, one rule per test."""

from typing import Any

import pytest

from moongate.simulator.openai_wire import (
    ApiError,
    Choice,
    Delta,
    Envelope,
    Usage,
    check_messages,
    parse_body,
    parse_options,
    parse_prompts,
    reused_token_ids,
)


def refusal(body: dict[str, Any], *, is_chat: bool = True) -> tuple[str, str, str | None]:
    with pytest.raises(ApiError) as caught:
        parse_options(body, is_chat=is_chat)
    return caught.value.message, caught.value.kind, caught.value.param


def test_a_completion_without_limit_gets_16_tokens() -> None:
    assert parse_options({}, is_chat=False).max_tokens == 16
    assert parse_options({"max_tokens": None}, is_chat=False).max_tokens is None


def test_a_chat_without_limit_has_none() -> None:
    assert parse_options({}, is_chat=True).max_tokens is None


def test_max_completion_tokens_wins_over_max_tokens_in_chat_only() -> None:
    body = {"max_tokens": 5, "max_completion_tokens": 7}
    assert parse_options(body, is_chat=True).max_tokens == 7
    assert parse_options(body, is_chat=False).max_tokens == 5


def test_a_session_in_the_body_wins_over_the_extra_arguments() -> None:
    extra = {"vllm_xargs": {"session_id": "x"}}
    assert parse_options(extra, is_chat=True).session_id == "x"
    assert parse_options({**extra, "session_id": "s"}, is_chat=True).session_id == "s"


def test_continuous_usage_needs_usage() -> None:
    body = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    assert not parse_options(body, is_chat=True).has_continuous_usage


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"n": 0}, "n must be at least 1, got 0.", "n"),
        ({"n": 129}, "n must be at most 128, got 129.", "n"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0.", "max_tokens"),
    ],
)
def test_numbers_out_of_range_are_refused(body: dict[str, Any], message: str, param: str) -> None:
    assert refusal(body) == (message, "BadRequestError", param)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
        (
            {"max_tokens": 1, "min_tokens": 5},
            "min_tokens must be less than or equal to max_tokens=1, got 5.",
        ),
        (
            {"max_completion_tokens": 1, "max_tokens": 9, "min_tokens": 5},
            "min_tokens must be less than or equal to max_tokens=1, got 5.",
        ),
    ],
)
def test_min_tokens_must_fit_max_tokens(body: dict[str, Any], message: str) -> None:
    assert refusal(body) == (message, "BadRequestError", None)
    assert parse_options({"min_tokens": 5}, is_chat=True).max_tokens is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": "maybe"}, "body.stream"),
        ({"kv_transfer_params": []}, "body.kv_transfer_params"),
        ({"n": True}, "body.n"),
        ({"max_tokens": "7"}, "body.max_tokens"),
        ({"stream_options": []}, "body.stream_options"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal(body)[1:] == ("Bad Request", param)


def test_stream_options_need_a_stream() -> None:
    assert refusal({"stream_options": {}})[0].startswith("Stream options can only be defined")


@pytest.mark.parametrize(
    ("content_type", "raw"),
    [("text/plain", b"{}"), ("application/json", b"{"), ("application/json", b"[]")],
)
def test_a_body_that_is_no_json_object_is_refused(content_type: str, raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(content_type, raw)
    assert caught.value.body()["error"]["type"] == "Bad Request"


def test_lenient_json_passes() -> None:
    body = parse_body("application/json; charset=utf-8", rb'{"a": NaN, "b": "\ud800"}')
    assert body["b"] == "\ud800"


def test_messages_are_required() -> None:
    with pytest.raises(ApiError) as caught:
        check_messages({})
    assert caught.value.param == "body.messages"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_may_be_text_or_ids_one_or_several(prompt: Any, expected: list[Any]) -> None:
    assert parse_prompts({"prompt": prompt}) == expected


@pytest.mark.parametrize("prompt", [None, "", [], ["a", 1], [-1], [[]], [True], 7])
def test_any_other_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError):
        parse_prompts({"prompt": prompt})


def test_ids_sent_by_a_gateway_replace_the_messages() -> None:
    assert reused_token_ids({"kv_transfer_params": {"prompt_token_ids": [1, 2]}}) == [1, 2]
    assert reused_token_ids({"kv_transfer_params": {"other": 1}}) is None
    with pytest.raises(ApiError):
        reused_token_ids({"kv_transfer_params": {"prompt_token_ids": []}})


def envelope(*, is_chat: bool, **body: Any) -> Envelope:
    return Envelope("id-1", 7, "sim", parse_options(body, is_chat=is_chat))


def test_usage_tells_cached_tokens_when_they_are_known() -> None:
    assert Usage(10, 2, 8).body() == {
        "prompt_tokens": 10,
        "total_tokens": 12,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    assert "prompt_tokens_details" not in Usage(10, 2, None).body()


def test_a_stream_opens_with_the_role_and_ends_with_usage() -> None:
    chat = envelope(is_chat=True)
    opening = chat.role_chunk(0, [1], Usage(1, 0, None))
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in opening
    last = chat.usage_chunk(Usage(1, 2, 0))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3)


def test_token_ids_are_told_only_when_asked_for() -> None:
    delta = Delta(0, "x", 5, "length", [1])
    usage = Usage(1, 1, None)
    plain = envelope(is_chat=False).delta_chunk(delta, usage)["choices"][0]
    asked = envelope(is_chat=False, return_token_ids=True).delta_chunk(delta, usage)["choices"][0]
    assert (plain["token_ids"], asked["token_ids"]) == (None, [5])
    assert (plain["prompt_token_ids"], asked["prompt_token_ids"]) == (None, [1])


def test_a_whole_answer_numbers_its_choices() -> None:
    choices = [Choice([1], "a", [5], "length"), Choice([1], "b", [6], "stop")]
    body = envelope(is_chat=True).response(choices, Usage(1, 2, 0))
    assert [(one["index"], one["message"]["content"]) for one in body["choices"]] == [
        (0, "a"),
        (1, "b"),
    ]
