"""A prefill and a decode engine that hand over and share a pool, which a store process holds.

By our launches, plugin and connectors; no gateway. What is tested is what the gateway relies on.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from pool_processes import MIB, MooncakePool
from processes import BLOCK_TOKENS, EngineProcess, free_port, running, until

from moongate.engine_plugins.kv_transfer_launch import Handoff

ENGINE: dict[str, Any] = {"max_model_len_tokens": 8192}


class Pair(NamedTuple):
    """Two engines, and where the prefill engine's workers are asked for."""

    prefill: EngineProcess
    decode: EngineProcess
    bootstrap_url: str
    master_url: str


@pytest.fixture(scope="module")
def pair(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    disk = folder / "disk"
    disk.mkdir()
    pool = MooncakePool(folder, segment_bytes=256 * MIB, disk=disk)
    bootstrap = free_port()
    prefill = pool.engine(
        tiny_model, "prefill", role="prefill", handoff=Handoff(bootstrap_port=bootstrap), **ENGINE
    )
    decode = pool.engine(tiny_model, "decode", role="decode", handoff=Handoff(), **ENGINE)
    with pool, running(prefill, decode):
        yield Pair(prefill, decode, f"http://127.0.0.1:{bootstrap}", pool.url)


def text() -> str:
    """Return a prompt of a few thousand tokens that no engine has seen."""
    name = uuid.uuid4().hex
    return " ".join(f"def f{number}(x): return x + {number}  # {name}" for number in range(40))


def complete(engine: EngineProcess, prompt: str, **more: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, **more}
    answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


def report(answer: Any) -> dict[str, int]:
    shown: dict[str, int] = answer["kv_transfer_params"]["moongate"]
    return shown


def hand_over(pair: Pair, prompt: str) -> Any:
    """Do both legs, and return the decode engine's answer."""
    workers = httpx.get(f"{pair.bootstrap_url}/query", trust_env=False).json()
    transfer = f"test-{uuid.uuid4()}"
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
    complete(pair.prefill, prompt, max_tokens=1, kv_transfer_params=prefill)
    decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": pair.bootstrap_url,
        "remote_engine_id": workers["0"]["engine_id"],
        "transfer_id": transfer,
    }
    return complete(pair.decode, prompt, kv_transfer_params=decode)


def full_blocks(answer: Any) -> int:
    tokens: int = answer["usage"]["prompt_tokens"]
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def keys_in_pool(pair: Pair) -> int:
    metrics = httpx.get(f"{pair.master_url}/metrics", timeout=10, trust_env=False).text
    (line,) = (line for line in metrics.splitlines() if line.startswith("master_key_count "))
    return int(float(line.split()[1]))


def wait_for_keys(pair: Pair, count: int) -> None:
    """Return when the pool has so many blocks: they are put there beside the answering."""
    until(lambda: keys_in_pool(pair) >= count, 20.0, lambda: (keys_in_pool(pair), count))


def test_prompts_are_handed_over_again_and_again(pair: Pair) -> None:
    """The second one matters: vLLM's own MultiConnector ends the engine with the first."""
    for _ in range(2):
        prompt = text()
        answer = hand_over(pair, prompt)
        usage = answer["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
        assert report(answer) == {"device_tokens": 0, "pool_tokens": 0}
        again = complete(pair.decode, prompt)
        assert again["choices"][0]["text"] == answer["choices"][0]["text"]
        assert report(again) == {"device_tokens": full_blocks(again), "pool_tokens": 0}


def test_an_answer_says_what_the_pool_gave(pair: Pair) -> None:
    prompt = text()
    before = keys_in_pool(pair)
    first = complete(pair.prefill, prompt)
    wait_for_keys(pair, before + full_blocks(first) // BLOCK_TOKENS)
    assert report(first) == {"device_tokens": 0, "pool_tokens": 0}
    other = complete(pair.decode, prompt)
    assert report(other) == {"device_tokens": 0, "pool_tokens": full_blocks(other)}
    assert other["choices"][0]["text"] == first["choices"][0]["text"]


def test_requests_for_the_other_side_end_no_engine(pair: Pair) -> None:
    for_decode = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": pair.bootstrap_url,
        "remote_engine_id": "nobody",
        "transfer_id": "x",
    }
    for_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "y"}
    complete(pair.prefill, text(), kv_transfer_params=for_decode)
    complete(pair.decode, text(), kv_transfer_params=for_prefill)
    hand_over(pair, text())
