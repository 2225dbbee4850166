"""Writes the tests of each case into docs/fault-cases.md, as their names say; what is right stays as it is.

A case without a row gets one whose sentence is to be written. Usage: `python scripts/make_fault_cases.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import groupby
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PAGE = PROJECT / "docs" / "fault-cases.md"
TESTS = PROJECT / "tests"

TEST = re.compile(r"^(?:async )?def (test_c(\d+)_\w+)\(", re.MULTILINE)
ROW = re.compile(r"^\| C(\d+) \| (.+?) \| .+ \|$", re.MULTILINE)
TO_WRITE = "TO BE WRITTEN"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sentences = {int(case): sentence for case, sentence in ROW.findall(text)}
    tests = find_tests()
    rows = [
        f"| C{case:02} | {sentences.get(case, TO_WRITE)} | {cell(tests[case])} |"
        for case in sorted(tests)
    ]
    head = text[: ROW.search(text).start()]  # type: ignore[union-attr]
    rest = text[[*ROW.finditer(text)][-1].end() :]
    PAGE.write_text(head + "\n".join(rows) + rest, encoding="utf-8")


def find_tests() -> dict[int, list[tuple[str, str]]]:
    """Return files and names of the tests of each case, in their order."""
    tests: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for file in sorted(TESTS.rglob("test_*.py")):
        for name, case in TEST.findall(file.read_text(encoding="utf-8")):
            tests[int(case)].append((file.relative_to(TESTS).as_posix(), name))
    return tests


def cell(tests: list[tuple[str, str]]) -> str:
    return "<br>".join(
        f"`{file}`: " + ", ".join(f"`{name}`" for _, name in names)
        for file, names in groupby(tests, key=lambda test: test[0])
    )


if __name__ == "__main__":
    main()
