"""Print the block digests that vLLM itself makes for some prompts, as JSON. Run by the engine's Python.

`python vllm_digests.py > tests/unit/kvpool/vllm_digests.json` renews what the tests compare with.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

TOKENS = [*range(1, 13), 4_294_967_295, 0, 70_000, 2**31]
"""Four blocks of four; among them the largest id that fits."""

SIZE = 4
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
SEEDS = (None, "0", "moongate")
"""PYTHONHASHSEED; None: not set, which is of chance for the xxhash algorithms."""

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"salt": "a-tenant"},
    "lora": {"lora": ("ad-1", "/adapters/one")},
    "lora_and_salt": {"lora": ("ad-1", "/adapters/one"), "salt": "a-tenant"},
}


def main() -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    rows = []
    for algorithm in ALGORITHMS:
        hash_value = get_hash_fn_by_name(algorithm)
        for seed in SEEDS:
            if seed is None and "xxhash" in algorithm:
                continue
            os.environ.pop("PYTHONHASHSEED", None)
            if seed is not None:
                os.environ["PYTHONHASHSEED"] = seed
            kv_cache_utils.init_none_hash(hash_value)
            for kind, isolation in KINDS.items():
                digests = _chain(kv_cache_utils, hash_value, isolation)
                names = [kv_cache_utils.maybe_convert_block_hash(digest) for digest in digests]
                rows.append(
                    {
                        "algorithm": algorithm,
                        "seed": seed,
                        "kind": kind,
                        "digests": [digest.hex() for digest in digests],
                        "names": names,
                    }
                )
    json.dump(rows, sys.stdout, indent=1)


def _chain(kv_cache_utils: Any, hash_value: Any, isolation: dict[str, Any]) -> list[bytes]:
    lora = isolation.get("lora")
    request = SimpleNamespace(
        mm_features=[],
        prompt_embeds=None,
        cache_salt=isolation.get("salt"),
        lora_request=SimpleNamespace(lora_name=lora[0], lora_path=lora[1]) if lora else None,
    )
    digests: list[bytes] = []
    for start in range(0, len(TOKENS), SIZE):
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + SIZE, 0)
        parent = digests[-1] if digests else None
        block = TOKENS[start : start + SIZE]
        digests.append(kv_cache_utils.hash_block_tokens(hash_value, parent, block, keys))
    return digests


if __name__ == "__main__":
    main()
