"""Every case of docs/fault-cases.md is a test, and every test of a case is on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from make_fault_cases import find_tests

PROJECT = Path(__file__).parents[2]
PAGE = PROJECT / "docs" / "fault-cases.md"
CASES = PROJECT.parent / "shared" / "cases" / "dev.md"

ROW = re.compile(r"^\| (C\d+) \| (.+?) \| (.+) \|$", re.MULTILINE)
FILE = re.compile(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)")

TO_COME: set[str] = set()
"""Cases whose tests come with admission, replicas and reloading. Empty it as they come."""


def listed() -> Iterator[tuple[str, str, str]]:
    """Iterate over what the page names: case, file, test."""
    for row in ROW.finditer(PAGE.read_text(encoding="utf-8")):
        for file, names in FILE.findall(row[3]):
            for name in re.findall(r"`(\w+)`", names):
                yield row[1], file, name


def written() -> set[tuple[str, str, str]]:
    """Return what there is: the same, of tests that are named by a case."""
    return {
        (f"C{case:02}", file, name) for case, tests in find_tests().items() for file, name in tests
    }


def test_the_page_and_the_tests_name_the_same() -> None:
    on_page, there = set(listed()), written()
    assert on_page - there == set(), "named on the page, and no test"
    assert there - on_page == set(), "not on the page: run scripts/make_fault_cases.py"


def test_every_row_has_a_test_and_a_line_of_its_own() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    cases = [case for case, _, _ in rows]
    assert len(cases) == len(set(cases))
    assert set(cases) == {case for case, _, _ in listed()}
    numbers = [int(case[1:]) for case in cases]
    assert numbers == sorted(numbers)


def test_no_known_case_is_left_out() -> None:
    if not CASES.is_file():
        pytest.skip("the collection of cases isn't here")
    known = set(re.findall(r"^### (C\d+) ", CASES.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(known) == 71
    on_page = {case for case, _, _ in listed()}
    assert known - on_page == TO_COME
