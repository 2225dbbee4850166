"""Keys as vLLM's store connector makes them."""

from __future__ import annotations

import pytest

from moongate.kvpool.keys import KeyLayout, Shard, model_part


def test_a_key_has_the_model_the_ranks_the_group_and_the_whole_digest() -> None:
    layout = KeyLayout("tiny")
    assert layout.key(Shard(), b"\x01\xff") == "tiny@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@01ff"
    ranks = Shard(tp=1, pcp=2, dcp=3, pp=4, group=5)
    assert layout.key(ranks, b"\x02") == "tiny@tp_rank:1@pcp2@dcp3@pp_rank:4@group:5@02"


def test_a_prefix_and_a_namespace_stand_around_the_model() -> None:
    layout = KeyLayout("m", cache_prefix="team", namespace="@store_tp:2@store_pp:1")
    start = "team@m@store_tp:2@store_pp:1@tp_rank:0@"
    assert layout.key(Shard(), b"\0").startswith(start)


def test_a_block_has_a_key_for_each_part() -> None:
    layout = KeyLayout("m", [Shard(), Shard(tp=1)])
    assert [key[:11] for key in layout.keys(b"\0")] == ["m@tp_rank:0", "m@tp_rank:1"]


@pytest.mark.parametrize(
    ("root", "part"),
    [("/models/tiny", "tiny"), ("/models/tiny/", "tiny"), ("org/Model-7B", "Model-7B"), ("m", "m")],
)
def test_a_model_is_called_by_the_last_part_of_its_path(root: str, part: str) -> None:
    assert model_part(root) == part
