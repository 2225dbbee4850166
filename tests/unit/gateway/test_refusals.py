"""What a `retry-after` asks for."""

from __future__ import annotations

import math

import pytest

from moongate.gateway.proxy.refusals import retry_after_s

AT = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        ("Tue, 14 Nov 2023 22:13:50 GMT", 30.0),
        ("Tue, 14 Nov 2023 22:00:00 GMT", 0.0),
        ("", math.inf),
        ("soon", math.inf),
        ("-3", math.inf),
        ("1.5", math.inf),
        ("\u0663", math.inf),
        ("9" * 5000, math.inf),
        ("Tue, 99 Nov 2023 22:13:50 GMT", math.inf),
    ],
)
def test_seconds_and_dates_are_understood(value: str, seconds: float) -> None:
    assert retry_after_s(value, AT) == seconds
