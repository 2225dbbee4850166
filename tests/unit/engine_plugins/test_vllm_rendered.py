"""What render routes answer, and the names of blocks with media: as vLLM's events have them."""

import json
from pathlib import Path
from typing import Any

import pytest
import vllm_media_keys
from vllm_media_keys import BLOCKS, LAYOUTS, SIZE

from moongate.engine_plugins.vllm_rendered import (
    Media,
    Rendered,
    RenderedError,
    hash_rendered,
    read_rendered,
)
from moongate.engine_plugins.vllm_wire import _extra_keys
from moongate.router import BlockSpace
from moongate.router.blocks import extend_chain, hash_prompt, pack_tokens, root_hash

SPACE = BlockSpace(SIZE)
TOKENS = pack_tokens(range(SIZE * BLOCKS))
ANNOUNCED = json.loads((Path(__file__).parent / "vllm_media_keys.json").read_text())


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_are_named_as_the_engine_announces_them(name: str) -> None:
    places, salt = LAYOUTS[name]
    announced = _extra_keys(ANNOUNCED[name], None)
    assert hash_rendered(SPACE, TOKENS, [Media(*place) for place in places], salt) == extend_chain(
        root_hash(SPACE), TOKENS, SIZE, announced
    )


def test_all_layouts_have_their_expected_keys() -> None:
    assert ANNOUNCED.keys() == LAYOUTS.keys()
    assert len(TOKENS) // 4 == vllm_media_keys.SIZE * BLOCKS


@pytest.mark.parametrize("salt", [None, "", "a"])
def test_without_media_it_is_a_text_prompts_chain(salt: str | None) -> None:
    tokens = pack_tokens(range(11))
    assert hash_rendered(SPACE, tokens, (), salt) == hash_prompt(SPACE, tokens, salt)
    assert hash_rendered(SPACE, pack_tokens(range(3)), (), salt) == []


def test_an_answer_is_read() -> None:
    features = {
        "mm_hashes": {"image": ["b", "a"], "audio": ["c"]},
        "mm_placeholders": {
            "image": [{"offset": 9, "length": 2}, {"offset": 1, "length": 3}],
            "audio": [{"offset": 5, "length": 1}],
        },
        "kwargs_data": None,
    }
    told = read_rendered({"token_ids": [1, 2], "features": features})
    assert told == Rendered([1, 2], (Media(1, 3, "a"), Media(5, 1, "c"), Media(9, 2, "b")))
    assert read_rendered([{"token_ids": [3], "features": None}]) == Rendered([3], ())


@pytest.mark.parametrize(
    "answer",
    [
        None, {}, [], [{"token_ids": [1]}, {"token_ids": [2]}], {"token_ids": "x"},
        {"token_ids": ["x"]}, {"token_ids": [1], "features": 3},
        {"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}},
        {"token_ids": [1], "features": {"mm_hashes": {"i": ["a"]}, "mm_placeholders": {"i": []}}},
        {"token_ids": [1], "features": {"mm_hashes": {"i": ["a"]}, "mm_placeholders": {"i": [{}]}}},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(answer: Any) -> None:
    with pytest.raises(RenderedError):
        read_rendered(answer)
