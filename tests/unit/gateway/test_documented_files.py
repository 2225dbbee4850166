"""The configuration files that the documentation shows are read as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moongate.gateway.config.settings_text import parse_settings

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("name", "announced"), [("two-nodes-rdma.md", 1), ("engines.md", 1)])
def test_files_for_announced_engines_take_them_from_other_machines(
    monkeypatch: pytest.MonkeyPatch, name: str, announced: int
) -> None:
    monkeypatch.setenv("MOONGATE_ADMIN_KEY", "k")
    text = (DOCS / name).read_text(encoding="utf-8")
    files = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert files
    read = [parse_settings(file, name) for file in files]
    without = [settings for settings in read if not settings.instances]
    assert [s.auth.admin_key_env for s in without] == ["MOONGATE_ADMIN_KEY"] * announced
    assert {s.listen.host for s in read} == {"0.0.0.0"}
    for command in ("moongate serve -c gateway.yaml", "export MOONGATE_ADMIN_KEY="):
        assert command in text
