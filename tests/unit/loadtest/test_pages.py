"""Pages and tables: well-formed, in one file, with nothing from elsewhere."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from made_runs import make_facts, make_totals, make_turn

import moongate.gateway.admin
from moongate.loadtest.charts import (
    SOURCES,
    VARIABLES,
    Axis,
    bar_chart,
    distribution,
    from_zero,
    line_chart,
    shares,
)
from moongate.loadtest.pages import comparison_page, in_flight, load_plot, run_page
from moongate.loadtest.summary import summarise
from moongate.loadtest.tables import comparison_table, difference_warning, format_run

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Notes elements that are not closed in order, and everything that a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.loads: list[str] = []
        self.points: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href"):
                self.loads.append(str(value))
            if name == "points":
                self.points.append(value or "")


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert (checker.open, checker.faults) == ([], [])
    assert checker.loads == []
    assert not re.search(r"url\(|@import", page)
    return checker


def test_a_run_s_page_is_whole_and_needs_nothing_else() -> None:
    turns = [make_turn(n) for n in range(20)]
    facts = make_facts(before=make_totals(0, 0, 0), after=make_totals(20, 2000, 1200))
    checker = check(run_page(summarise(turns, facts), turns))
    assert len(checker.points) >= 6
    for points in checker.points:
        for place in points.split():
            x, y = map(float, place.split(","))
            assert 0 <= x <= 720
            assert 0 <= y <= 300


def test_what_others_chose_is_text_in_a_page() -> None:
    turns = [make_turn(0, instance="<script>alert(1)</script>", reason="<b>")]
    page = run_page(summarise(turns, make_facts(url='http://h/"><script>')), turns)
    check(page)
    assert "<script" not in page


def test_a_page_without_turns_says_so() -> None:
    page = run_page(summarise([], make_facts()), [])
    check(page)
    assert "no data" in page


def test_runs_stand_side_by_side() -> None:
    runs = {
        name: [make_turn(n, ttft_ms=factor * (n + 1.0)) for n in range(10)]
        for name, factor in (("one", 10.0), ("two", 5.0), ("three", 1.0))
    }
    reports = {name: summarise(turns, make_facts()) for name, turns in runs.items()}
    check(comparison_page(reports, runs))
    pair = {name: reports[name] for name in ("one", "two")}
    lines = str(comparison_table(pair)).splitlines()
    assert lines[0].split() == ["one", "two", "change"]
    assert next(line for line in lines if "TTFT p50" in line).split()[-3:] == [
        "50.0",
        "25.0",
        "-50.0%",
    ]
    short = comparison_table(reports, is_short=True)
    assert [row[0] for row in short.rows] == ["one", "two", "three"]


def test_the_printed_run_has_totals_warnings_and_agreement() -> None:
    turns = [make_turn(0), make_turn(1, outcome="timeout")]
    facts = make_facts(before=make_totals(0, 0, 0), after=make_totals(2, 200, 120))
    printed = format_run(summarise(turns, facts))
    assert re.search(r"^turns +2$", printed, re.MULTILINE)
    assert re.search(r"^prompt tokens +200 +200 +\+0.00%$", printed, re.MULTILINE)
    assert "! 1 of 2 turns failed: 1 timeout." in printed


def test_a_distribution_rises_from_nothing_to_all() -> None:
    points = distribution(float(n) for n in range(1000, 0, -1))
    assert points[0] == (1.0, 0.0)
    assert points[-1] == (1000.0, 1.0)
    assert len(points) <= 203
    assert points == sorted(points)
    assert distribution([]) == []


@pytest.mark.parametrize("most", [0.0, 0.3, 1.0, 7.0, 1234.0])
def test_axes_have_a_few_round_ticks(most: float) -> None:
    ticks = Axis("", 0.0, most).ticks()
    assert 1 <= len(ticks) <= 7
    assert all(0 <= tick <= most * 1.0001 for tick in ticks)


def test_logarithmic_axes_tick_within_their_bounds() -> None:
    assert Axis("", 30.0, 3000.0, is_log=True).ticks() == [50, 100, 200, 500, 1000, 2000]
    assert "polyline" in line_chart("t", {"a": [(30.0, 0.5)]}, Axis("", 30, 40, is_log=True), Axis("", 0, 1)).figure()  # fmt: skip


def test_load_counts_turns_that_overlap() -> None:
    turns = [make_turn(0, e2e_ms=2500.0), make_turn(1, e2e_ms=500.0), make_turn(5, e2e_ms=1000.0)]
    points = dict(in_flight(turns, end_s=6.0))
    assert max(points.values()) == 2.0
    assert points[3.5] == 0.0
    assert points[5.5] == 1.0


def test_a_load_line_steps_and_goes_on_until_the_last_turn_s_end() -> None:
    turns = [make_turn(0, instance="idle", e2e_ms=500.0), make_turn(9, instance="busy")]
    chart = load_plot(turns)
    for mark in chart.marks:
        places = [p.split(",") for p in re.search(r'points="([^"]+)"', mark)[1].split()]  # type: ignore[index]
        assert all(x == u or y == v for (x, y), (u, v) in pairwise(places))
        assert places[-1][0] == "530.0"


def test_axes_end_at_a_round_tick() -> None:
    assert from_zero("ms", 1234.0).ticks()[-1] == 1500.0
    assert from_zero("turns", 1.0, is_whole=True).ticks() == [0.0, 1.0]
    assert from_zero("ms", 0.0).ticks()[-1] >= 1.0
    share = shares("share")
    assert [share.format(tick) for tick in share.ticks()][-1] == "100%"
    assert Axis("ms", 1.0, 20_000.0, is_log=True).format(10_000.0) == "10,000"
    assert Axis("ms", 31.0, 39.0, is_log=True).ticks() == [32, 34, 36, 38]


def test_a_picture_has_its_whole_legend() -> None:
    name = "a policy whose name is much longer than a picture is wide, " * 3
    line = {name: [(0.0, 1.0), (1.0, 2.0)]}
    picture = line_chart("t", line, from_zero("x", 1.0), from_zero("y", 2.0)).picture()
    told = " ".join(re.findall(r'class="told"[^>]*>([^<]+)<', picture))
    assert told == name.strip()
    height = float(re.search(r'height="(\d+)"', picture)[1])  # type: ignore[index]
    assert all(float(y) < height for y in re.findall(r'class="told"[^>]* y="([\d.]+)"', picture))
    bars = {name: {"one": 0.25, "two": 0.5}}
    colours = {"one": "red", "two": "blue"}
    picture = bar_chart("t", bars, shares("share"), colours=colours).picture()
    assert " ".join(re.findall(r'class="told"[^>]*>([^<]+)<', picture)) == f"{name}one two"


def test_sources_have_the_dashboard_s_colours() -> None:
    css = Path(moongate.gateway.admin.__file__).with_name("ui") / "dashboard.css"
    variables = {"device": "device-prefix", "pool": "pool-prefix", "recompute": "load"}
    for source in set(SOURCES) - {"cached"}:
        here = re.findall(rf"--{source}: (#\w+);", VARIABLES)
        assert here == re.findall(rf"--{variables[source]}: (#\w+);", css.read_text()), source
        assert len(here) == 2


def test_runs_of_other_settings_are_told_apart() -> None:
    turns = [make_turn(n) for n in range(3)]
    one = summarise(turns, make_facts())
    assert difference_warning({"one": one, "again": one}) is None
    settings = replace(make_facts().settings, seed=8)
    two = summarise(turns, make_facts(users=10, settings=settings))
    told = difference_warning({"one": one, "two": two})
    assert told == "The runs differ in what was sent: users (one 5, two 10); seed (one 7, two 8)."
    page = comparison_page({"one": one, "two": two}, {"one": turns, "two": turns})
    check(page)
    assert f'<p class="warning">{told}</p>' in page
    assert "two: agents; http://127.0.0.1:1, model m; 10 users; 10 s from" in page
