"""The digests that `tests/unit/kvpool` compares with are those of the installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import vllm_digests
import vllm_media_keys
import xxhash
from processes import ENGINE_PYTHON, PROJECT

EXPECTED = PROJECT / "tests" / "unit" / "kvpool" / "vllm_digests.json"


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no vLLM here: make setup-engine")
def test_vllm_makes_the_digests_that_are_expected_of_it(tmp_path: Path) -> None:
    # The engine's environment has no xxhash, without which its xxhash algorithms don't work.
    (tmp_path / "xxhash").symlink_to(Path(xxhash.__file__).parent)
    environment = {
        **os.environ, "PYTHONPATH": str(tmp_path), "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "1",
    }  # fmt: skip
    made = subprocess.run(
        [ENGINE_PYTHON, vllm_digests.__file__],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(made.stdout[made.stdout.index("[\n") :]) == json.loads(EXPECTED.read_text())


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="no vLLM here: make setup-engine")
def test_vllm_announces_media_as_is_expected_of_it() -> None:
    expected = PROJECT / "tests" / "unit" / "engine_plugins" / "vllm_media_keys.json"
    made = subprocess.run(
        [ENGINE_PYTHON, vllm_media_keys.__file__], capture_output=True, text=True, check=True
    )
    assert json.loads(made.stdout[made.stdout.index("{\n") :]) == json.loads(expected.read_text())
