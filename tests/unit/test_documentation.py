"""What the documentation shows is so: commands parse, targets exist, files are accepted, links lead somewhere."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from moongate.cli import _make_parser
from moongate.gateway.config.settings import Settings
from moongate.gateway.config.settings_text import parse_settings
from moongate.router.model import Holder, InstanceId, Request, RequestId, Role, Trust
from moongate.router.policy import Candidate, Situation, make_policy

PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted(PROJECT.glob("docs/*.md"))]
LINKING = [*PAGES, *sorted(PROJECT.glob("docs/decisions/*.md")), PROJECT / "benchmarks/README.md"]

SHELL = ("", "sh", "bash", "console")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"(?:\$ )?(?:[A-Z_]+=\S* )*(?:\.venv/bin/|python -m )?(?P<program>[a-z]+)(?:\.cli)?(?P<words>(?: .*)?)$"
)


class Shown(NamedTuple):
    """A command or a file on a page."""

    page: str
    text: str


def blocks(page: Path, languages: tuple[str, ...]) -> Iterator[str]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        if match[2] in languages:
            yield match[3]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def commands(program: str) -> list[Shown]:
    """Return the command lines of a program in shell blocks, without it, variables before it and `&`."""
    found: list[Shown] = []
    for page in PAGES:
        for block in blocks(page, SHELL):
            for line in block.replace("\\\n", " ").splitlines():
                match = COMMAND.match(line)
                if match is not None and match["program"] == program:
                    words = shlex.split(match["words"], comments=True)
                    rest = [word for word in words if word != "&"]
                    found.append(Shown(page.name, shlex.join(rest)))
    return found


def targets() -> set[str]:
    text = (PROJECT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", text, re.MULTILINE))


# --- commands -------------------------------------------------------------------------------------


def test_there_are_commands_to_look_at() -> None:
    """Else a change of the extraction would let everything pass."""
    assert len(commands("moongate")) > 30
    assert len(commands("make")) > 4


@pytest.mark.parametrize("shown", commands("moongate"), ids=" ".join)
def test_a_moongate_command_parses(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        options = _make_parser().parse_args(shlex.split(shown.text))
    except SystemExit as error:
        pytest.fail(f"{shown.page}: moongate {shown.text}: {error}\n{capsys.readouterr().err}")
    assert callable(options.command)


@pytest.mark.parametrize("shown", commands("make"), ids=" ".join)
def test_a_make_command_has_its_target(shown: Shown) -> None:
    wanted = {word for word in shlex.split(shown.text) if "=" not in word}
    assert wanted <= targets(), shown.page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    for span in CODE_SPAN.findall(prose(page)):
        words = span.removeprefix(".venv/bin/").split()
        if words[0] == "make" and len(words) > 1:
            wanted = {word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)}
            assert wanted <= targets(), span
        elif words[0] == "moongate" and len(words) > 1:
            check_words(words[1:], span)


def check_words(words: list[str], span: str) -> None:
    """Check the names of commands and options; what must be given may be missing in a text."""
    parser = _make_parser()
    while words and (deeper := deeper_of(parser).get(words[0])) is not None:
        parser = deeper
        words = words[1:]
    assert parser.prog != "moongate" or words[0].startswith("-") or words == ["…"], span
    known = {name for action in parser._actions for name in action.option_strings}
    given = {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}
    assert given <= known, span


def deeper_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


# --- files ----------------------------------------------------------------------------------------


def configurations() -> list[Shown]:
    """Return the YAML blocks that are the configuration file or a part of it."""
    known = set(Settings.model_fields)
    found: list[Shown] = []
    for page in PAGES:
        for block in blocks(page, ("yaml",)):
            keys = yaml.safe_load(block)
            if isinstance(keys, dict) and ("instances" in keys or set(keys) <= known):
                text = block if "instances" in keys else f"{block}instances: []\n"
                found.append(Shown(page.name, text))
    return found


@pytest.fixture
def own_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the policy that docs/policies.md shows where its configuration looks for it."""
    (code,) = blocks(PROJECT / "docs" / "policies.md", ("python",))
    (tmp_path / "my_policy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)


@pytest.mark.usefixtures("own_policy")
@pytest.mark.parametrize("shown", configurations(), ids=lambda shown: shown.page)
def test_a_configuration_is_accepted(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"_env: ([A-Z_]+)", shown.text):
        monkeypatch.setenv(name, f"k-{name}")
    parse_settings(shown.text, shown.page)


@pytest.mark.usefixtures("own_policy")
def test_the_policy_that_is_shown_ranks_as_it_says() -> None:
    policy = make_policy("my_policy:LongPromptsToTheStrong", {"long_tokens": 1000})

    def candidate(name: str, weight: float, overlap_tokens: int) -> Candidate:
        holder = Holder(InstanceId(name), None)
        return Candidate(
            holder, Role.BOTH, weight, Trust.EXACT, active_requests=0, queued_prefill_tokens=0,
            last_chosen=0, overlap_tokens=overlap_tokens,
        )  # fmt: skip

    weak, strong = candidate("a", 1.0, 512), candidate("b", 2.0, 0)
    firsts = []
    for prompt_tokens in (600, 2000):
        request = Request(RequestId("r"), "m")
        situation = Situation(request, prompt_tokens, 0, 0, 8.0, places=2)
        ranked = policy.rank(situation, [weak, strong], lambda below: 0)
        assert len(ranked) == 2
        firsts.append(ranked[0].candidate)
    assert firsts == [weak, strong]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles(page: Path) -> None:
    for block in blocks(page, ("python",)):
        compile(block, page.name, "exec")


# --- links ----------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives a page's headings."""
    headings = re.findall(r"^#{1,6} +(.+?) *$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall(prose(PROJECT / "README.md"))}
    assert {f"docs/{page.name}" for page in PROJECT.glob("docs/*.md")} - linked == set()
