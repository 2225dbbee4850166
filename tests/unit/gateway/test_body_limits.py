"""What a body may have at most: just as much passes, one more is told by name."""

from typing import Any

import pytest

from moongate.gateway.config.process_settings import LimitsSettings
from moongate.gateway.dialects.body_limits import check_limits
from moongate.gateway.errors import GatewayError

LIMITS = LimitsSettings(json_depth_max=8, messages_max=3, stop_max=2)


def nested(levels: int, *, by: str = "list") -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value, "x"] if by == "list" else {"a": 1, "b": value}
    return value


def refusal(fields: dict[str, Any]) -> tuple[str, str | None]:
    with pytest.raises(GatewayError) as caught:
        check_limits(fields, 1000, LIMITS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value.message, caught.value.param


@pytest.mark.parametrize("by", ["list", "object"])
def test_so_many_levels_and_no_more(by: str) -> None:
    check_limits({"model": "m", "x": 1, "y": nested(7, by=by)}, 1000, LIMITS)
    message = "y: nested too deeply; limits.json_depth_max is 8"
    assert refusal({"model": "m", "x": [], "y": nested(8, by=by)}) == (message, "y")


def test_what_is_too_short_to_be_too_deep_is_not_looked_into() -> None:
    check_limits({"y": nested(20)}, 16, LIMITS)


@pytest.mark.parametrize("name", ["messages", "input", "prompt", "documents"])
def test_so_many_items_and_no_more(name: str) -> None:
    check_limits({name: ["x"] * 3}, 1000, LIMITS)
    assert refusal({name: ["x"] * 4}) == (f"{name}: 4 items; limits.messages_max is 3", name)


def test_token_ids_are_one_prompt() -> None:
    check_limits({"prompt": [1] * 100, "input": [1] * 100}, 1000, LIMITS)
    assert refusal({"prompt": [[1]] * 4})[1] == "prompt"


@pytest.mark.parametrize("name", ["stop", "stop_sequences"])
def test_so_many_stop_strings_and_no_more(name: str) -> None:
    check_limits({name: ["x"] * 2}, 1000, LIMITS)
    assert refusal({name: ["x"] * 3}) == (f"{name}: 3 stop strings; limits.stop_max is 2", name)
    check_limits({name: "a long string"}, 1000, LIMITS)


def test_of_other_kinds_the_engine_says_what_is_wrong() -> None:
    check_limits({"messages": "x", "stop": 3, "input": {}, "prompt": []}, 1000, LIMITS)


def test_what_engines_take_is_within_the_defaults() -> None:
    """vLLM answers a body with a field that is nested 200 levels deep (tests/e2e/test_differential.py)."""
    nested: list[object] = []
    for _ in range(200):
        nested = [nested]
    check_limits({"x": nested}, 500_000, LimitsSettings())
