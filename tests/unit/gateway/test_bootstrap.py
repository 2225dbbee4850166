"""Which engine a bootstrap server names, and what is wrong with those that name none."""

from __future__ import annotations

import orjson
import pytest

from moongate.gateway.proxy.bootstrap import BootstrapFailed, read_engine_id

URL = "http://p:8998"
WORKERS = {"worker_addr": {"0": {"0": "tcp://10.0.0.1:5000"}}}


def ranks(*names: int) -> bytes:
    return orjson.dumps({str(rank): {"engine_id": f"e{rank}", **WORKERS} for rank in names})


@pytest.mark.parametrize(
    ("body", "rank", "engine_id"),
    [
        (ranks(0), None, "e0"),
        (ranks(0), 0, "e0"),
        (ranks(3), None, "e3"),  # of an engine of its own that is a part of a larger group
        (ranks(0, 1), 1, "e1"),
    ],
)
def test_the_engine_of_a_rank_or_the_only_one_is_named(
    body: bytes, rank: int | None, engine_id: str
) -> None:
    assert read_engine_id(URL, body, rank) == engine_id


@pytest.mark.parametrize(
    ("body", "rank", "problem"),
    [
        (b"<html>", None, "not JSON"),
        (b"[]", None, "not an object"),
        (b"{}", None, "no engine_id; has it registered"),
        (b"{}", 0, "no engine_id for rank 0"),
        (ranks(0), 1, "no engine_id for rank 1"),
        (ranks(0, 1), None, r"several ranks \(0, 1\): name them, ranks: \[0, 1\]"),
        (b'{"0": 5}', 0, "no engine_id"),
        (b'{"0": {"engine_id": 5}}', 0, "no engine_id"),
        (b'{"0": {"engine_id": ""}}', 0, "no engine_id"),
    ],
)
def test_what_names_none_says_why(body: bytes, rank: int | None, problem: str) -> None:
    with pytest.raises(BootstrapFailed, match=problem):
        read_engine_id(URL, body, rank)
