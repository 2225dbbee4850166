"""Print what vLLM itself announces beside the ids of blocks with media in them, as JSON. Run by the engine's
Python.

`python vllm_media_keys.py > tests/unit/engine_plugins/vllm_media_keys.json` renews what the tests compare with.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

SIZE = 4
BLOCKS = 6

Layout = tuple[list[tuple[int, int, str]], str | None]

LAYOUTS: dict[str, Layout] = {
    "none": ([], None),
    "salt": ([], "a-tenant"),
    "within_a_block": ([(1, 2, "aa")], None),
    "over_blocks": ([(3, 9, "aa")], None),
    "two_in_a_block": ([(0, 2, "aa"), (2, 3, "bb")], None),
    "from_a_boundary_to_one": ([(4, 8, "aa"), (12, 4, "bb")], None),
    "salt_and_media": ([(2, 6, "aa"), (17, 5, "aa")], "a-tenant"),
}
"""Places (offset, length, name) and salts."""


def main() -> None:
    from vllm.v1.core import kv_cache_utils

    rows = {name: _keys(kv_cache_utils, *layout) for name, layout in LAYOUTS.items()}
    json.dump(rows, sys.stdout, indent=1)


def _keys(kv_cache_utils: Any, media: list[tuple[int, int, str]], salt: str | None) -> Any:
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for offset, length, name in media
    ]
    request = SimpleNamespace(
        mm_features=features, prompt_embeds=None, cache_salt=salt, lora_request=None
    )
    made = [
        kv_cache_utils.generate_block_hash_extra_keys(request, start, start + SIZE, 0)[0]
        for start in range(0, BLOCKS * SIZE, SIZE)
    ]
    return kv_cache_utils.to_event_extra_keys(made)


if __name__ == "__main__":
    main()
