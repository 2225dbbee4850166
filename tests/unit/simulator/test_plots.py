"""The pictures of `moongate simulate`: files that stand alone, with whole legends."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from moongate.simulator.bounds import Bounds
from moongate.simulator.plots import write_plots
from moongate.simulator.trial import Result, Row


def make_result(**changes: Any) -> Result:
    row = Row(
        name="pool/kv_cost", workload="codex-like", load="75 sessions", fault="", instances=2, gpus=12,
        hit_rate=0.9, device_hit_rate=0.25, pool_hit_rate=0.5, throughput=3.0, ttft_ms_p50=200.0,
        ttft_ms_p99=400.0, e2e_ms_p50=900.0, pool_bytes=1e12, load_max_over_mean=1.5,
        decision_ms_p50=0.1, requests=3, failures=0,
    )._replace(**changes)  # fmt: skip
    loads = [(60.0, [0.5, 0.25]), (123.0, [0.0, 0.0]), (180.0, [0.5, 0.5])]
    return Result(row, [100.0, 200.0, 12_345.0], loads, Bounds(1.0, 1.0, 1.0))


def texts_of(picture: str, kind: str) -> list[str]:
    found = re.findall(rf'<text class="{kind}"[^>]*>([^<]*)<', picture)
    return [html.unescape(text) for text in found]


def test_pictures_stand_alone_and_tell_their_lines_apart(tmp_path: Path) -> None:
    results = [make_result(), make_result(load="75 sessions, DualPath"), make_result(fault="A & B")]
    files = write_plots(tmp_path, "p", results)
    assert [file.name for file in files] == ["p-hits.svg", "p-ttft.svg", "p-load.svg"]
    for file in files:
        picture = file.read_text(encoding="utf-8")
        ElementTree.fromstring(picture)
        assert picture.startswith("<svg")
        assert "prefers-color-scheme: dark" in picture
        labels = texts_of(picture, "told")[:3]
        assert labels == [
            "pool/kv_cost, 75 sessions",
            "pool/kv_cost, 75 sessions, DualPath",
            "pool/kv_cost, 75 sessions, A & B",
        ]
        assert " ".join(texts_of(picture, "heading")).endswith("codex-like, 2 instances")


def test_rows_that_are_told_alike_are_numbered(tmp_path: Path) -> None:
    write_plots(tmp_path, "p", [make_result(), make_result()])
    labels = texts_of((tmp_path / "p-ttft.svg").read_text(encoding="utf-8"), "told")
    assert labels == ["1: pool/kv_cost", "2: pool/kv_cost"]


def test_sizes_are_compared_from_three_on(tmp_path: Path) -> None:
    sizes = [make_result(instances=n, gpus=2 * n, load=f"{n} sessions") for n in (8, 32, 1000)]
    names = {file.name for file in write_plots(tmp_path, "p", sizes)}
    assert {"p-size.svg", "p-decision.svg"} < names
    picture = (tmp_path / "p-size.svg").read_text(encoding="utf-8")
    ticks = re.findall(r'text-anchor="middle">([\d,.]+)<', picture)
    assert ticks == ["0", "500", "1,000", "1,500", "2,000"]
