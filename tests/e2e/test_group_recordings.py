"""The recordings of vLLM's cache manager that unit tests read are what the installed vLLM says."""

from __future__ import annotations

import subprocess
import zlib
from pathlib import Path

import pytest
from processes import ENGINE_PYTHON, PROJECT

RECORDINGS = PROJECT / "tests" / "fixtures" / "vllm_groups"


@pytest.mark.skipif(not ENGINE_PYTHON.exists(), reason="needs make setup-engine")
def test_the_recordings_are_what_vllm_says_today(tmp_path: Path) -> None:
    recorder = PROJECT / "scripts" / "record_vllm_groups.py"
    subprocess.run([ENGINE_PYTHON, recorder, tmp_path], check=True, capture_output=True)
    assert unpacked(tmp_path) == unpacked(RECORDINGS)


def unpacked(folder: Path) -> dict[str, bytes]:
    return {file.name: zlib.decompress(file.read_bytes()) for file in folder.iterdir()}
