"""The Dockerfiles: what hadolint says, and what it doesn't look at."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest
from build_images import Image, all_images
from compose_file import tool
from processes import PROJECT

IMAGES = all_images()


@pytest.fixture(params=IMAGES, ids=lambda image: image.name)
def image(request: pytest.FixtureRequest) -> Image:
    found: Image = request.param
    return found


def stages(image: Image) -> list[list[str]]:
    """Return the instructions of each stage, each on one line, without comments."""
    text = re.sub(r"^\s*#.*\n", "", image.dockerfile.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line]
    starts = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    return [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def test_hadolint_has_nothing_to_say(image: Image) -> None:
    done = subprocess.run(
        [tool("hadolint"), "--no-color", str(image.dockerfile)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_image_has_a_stage_to_build_and_one_to_run_as_nobody_in_particular(image: Image) -> None:
    *building, running = stages(image)
    assert building
    assert [line for line in running if line.startswith("USER ")][-1] == "USER 10001:10001"
    assert sum(line.startswith("HEALTHCHECK ") for line in running) == 1
    assert "STOPSIGNAL SIGTERM" in running
    assert any(line.startswith("CMD [") for line in running), "not by way of a shell"


def test_bases_are_pinned_and_nothing_is_fetched_but_packages(image: Image) -> None:
    for base in image.bases():
        assert re.fullmatch(r"docker\.io/[\w./-]+:v?\d+\.\d+[\w.-]*", base), base
    text = image.dockerfile.read_text()
    assert not re.search(r"^ADD ", text, re.MULTILINE)
    assert not re.search(r"https?://(?!127\.0\.0\.1)", text)
    assert not re.search(r"\b(curl|wget)\b(?!4)", text)


def test_what_apt_leaves_behind_is_taken_out_in_the_same_step(image: Image) -> None:
    for stage in stages(image):
        for line in stage:
            if "apt-get install" in line:
                assert "--no-install-recommends" in line
                assert "rm -rf /var/lib/apt/lists/*" in line


def test_pip_takes_only_what_is_pinned(image: Image) -> None:
    for stage in stages(image):
        for line in stage:
            for words in re.findall(r"pip install ([^&]*)", line):
                assert "--no-deps" in words, "nothing may be resolved at build time"


def test_every_component_gets_into_the_images_and_through_dockerignore(image: Image) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    components = {name.split(".")[1] for name in packages if "." in name}
    text = image.dockerfile.read_text()
    for component in components:
        assert re.search(rf"^COPY {component} /src/{component}$", text, re.MULTILINE)
    ignored = (PROJECT / ".dockerignore").read_text().splitlines()
    assert {f"!{component}" for component in components} <= set(ignored)
    assert "*" in ignored
    for name in {word for _, word in re.findall(r"^COPY (--chmod=\d+ )?(\S+)", text, re.MULTILINE)}:
        kept = (f"!{name}", f"!{name.partition('/')[0]}")
        assert name.startswith("--from") or set(kept) & set(ignored), name


def test_an_images_hash_is_that_of_what_it_copies() -> None:
    images = {image.name: image for image in IMAGES}
    assert images["gateway"].digest() == images["gateway"].digest()
    assert images["gateway"].digest() != images["engine-cpu"].digest()
    assert images["gateway"].missing_sources() == []
