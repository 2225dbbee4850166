"""The gateway's own errors have the shape that OpenAI clients know."""

import json

import pytest

from moongate.gateway.errors import GatewayError, error_body, stream_error_events


def test_an_error_has_message_type_param_and_code() -> None:
    error = GatewayError(400, "model: missing", "invalid_request", "model")
    assert json.loads(error.body()) == {
        "error": {
            "message": "model: missing",
            "type": "invalid_request_error",
            "param": "model",
            "code": "invalid_request",
        }
    }
    assert str(error) == "400 invalid_request: model: missing"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "invalid_request_error"),
        (405, "invalid_request_error"),
        (413, "invalid_request_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (431, "invalid_request_error"),
        (500, "server_error"),
        (502, "server_error"),
        (503, "server_error"),
        (504, "server_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    assert json.loads(error_body("x", status, None))["error"]["type"] == kind


def test_a_stream_that_breaks_off_ends_with_an_error_and_the_end_mark() -> None:
    error, done, rest = stream_error_events("broken off", "engine_disconnected").split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: ")) == {
        "error": {
            "message": "broken off",
            "type": "server_error",
            "param": None,
            "code": "engine_disconnected",
        }
    }
    assert (done, rest) == (b"data: [DONE]", b"")
