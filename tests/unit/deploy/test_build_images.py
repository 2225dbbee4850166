"""What `make images` does where a base image can't be had: it says so, and goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from build_images import Image, Options, all_images, build_all

DEBIAN = "docker.io/library/debian:12.12-slim"


@dataclass
class OfflineBuilder:
    """A builder that has some bases and pulls none."""

    bases: Sequence[str] = (DEBIAN,)
    current: Sequence[str] = ()
    built: list[str] = field(default_factory=list)
    name: str = "docker"

    def has(self, image: str) -> bool:
        return image in self.bases

    def pull(self, image: str) -> bool:
        return False

    def is_current(self, image: Image) -> bool:
        return image.name in self.current

    def build(self, image: Image, build_args: Sequence[str]) -> None:
        self.built.append(image.name)

    def size_bytes(self, image: Image) -> int:
        return 200_000_000


def options(*, needs_all: bool) -> Options:
    return Options(mounts=(), build_args=(), may_stand_in=True, needs_all=needs_all)


@pytest.mark.parametrize("needs_all", [False, True])
def test_what_can_not_be_built_is_said_and_fails_only_where_all_is_asked_for(
    needs_all: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = OfflineBuilder()
    code = build_all(all_images(), builder, options(needs_all=needs_all))
    assert code == (1 if needs_all else 0)
    assert builder.built == ["engine-cpu", "gateway", "loadtest"]
    printed = capsys.readouterr().out
    reason = "its base docker.io/vllm/vllm-openai:v0.32.0 can't be pulled here"
    assert f"engine-gpu   not built: {reason}" in printed
    assert "gateway          200 MB   localhost/moongate-gateway:" in printed


def test_without_a_daemons_base_nothing_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    builder = OfflineBuilder(bases=())
    assert build_all(all_images(), builder, options(needs_all=False)) == 0
    assert builder.built == []
    assert capsys.readouterr().out.count("not built: its base") == 4


def test_what_is_current_is_not_built_again() -> None:
    builder = OfflineBuilder(current=("gateway", "loadtest"))
    build_all(all_images(), builder, options(needs_all=False))
    assert builder.built == ["engine-cpu"]
