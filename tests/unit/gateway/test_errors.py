"""The gateway's own errors have the shapes that the clients of each API know."""

import json

import pytest

from moongate.gateway.dialects.routes import ApiFamily
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
    events = stream_error_events("broken off", "engine_disconnected", ApiFamily.OPENAI)
    error, done, rest = events.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: ")) == {
        "error": {
            "message": "broken off",
            "type": "server_error",
            "param": None,
            "code": "engine_disconnected",
        }
    }
    assert (done, rest) == (b"data: [DONE]", b"")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "api_error"),
    ],
)
def test_anthropic_clients_get_their_own_shape(status: int, kind: str) -> None:
    body = GatewayError(status, "no", "a_code", "a_field").body(ApiFamily.ANTHROPIC)
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_a_message_that_breaks_off_ends_with_an_error_event() -> None:
    events = stream_error_events("broken off", "engine_disconnected", ApiFamily.ANTHROPIC)
    event, rest = events.split(b"\n\n")
    name, data = event.split(b"\n")
    assert (name, rest) == (b"event: error", b"")
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken off"},
    }


CREATED = (
    b"event: response.created\n"
    b'data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1","model":"m",'
    b'"status":"in_progress","output":[],"error":null}}\n\n'
)
DELTA = b'event: response.output_text.delta\ndata: {"delta":"x","sequence_number": 7}\n\n'


@pytest.mark.parametrize(
    ("first", "last", "number", "response"),
    [
        (CREATED + DELTA, DELTA, 8, {"id": "resp_1", "model": "m"}),
        (CREATED, b"", 1, {"id": "resp_1", "model": "m"}),
        (b"event: response.created\ndata: {", b"", 0, {}),
        (b'event: response.created\ndata: {"response": 1}\n\n', b"", 0, {}),
        (b"event: response.created\ndata: []\n\n", b"", 0, {}),
        (b": hello\n\n", b"", 0, {}),
    ],
)
def test_a_response_that_breaks_off_ends_as_failed(
    first: bytes, last: bytes, number: int, response: dict[str, str]
) -> None:
    events = stream_error_events("x", "c", ApiFamily.RESPONSES, first=first, last=last)
    event, rest = events.split(b"\n\n")
    name, data = event.split(b"\n")
    assert (name, rest) == (b"event: response.failed", b"")
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "response.failed",
        "sequence_number": number,
        "response": {
            "object": "response",
            "output": [],
            **response,
            "status": "failed",
            "error": {"code": "server_error", "message": "x"},
        },
    }
