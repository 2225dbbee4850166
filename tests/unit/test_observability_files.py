"""Dashboards, alerts and what starts them, as files: whole, consistent, and with a runbook each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from observability_files import DASHBOARDS, FOLDER, RULES, Expression, alerts, panels, rules

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here (Debian: apt-get install prometheus)"
)


def promtool(*words: str | Path) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- rules ----------------------------------------------------------------------------------------


@needs_promtool
def test_prometheus_takes_its_configuration_and_all_rules() -> None:
    assert "SUCCESS" in promtool("check", "config", FOLDER / "prometheus.yml")
    for file in RULES.glob("*.yml"):
        promtool("check", "rules", "--lint=all", "--lint-fatal", file)


def test_every_alert_has_a_severity_a_summary_and_a_section_in_the_runbook() -> None:
    sections = re.findall(r"^### (.+)$", OPERATIONS.read_text(), re.MULTILINE)
    anchors = {section.lower().replace(" ", "-") for section in sections}
    named = set()
    for alert in alerts():
        assert alert["labels"]["severity"] in ("critical", "warning", "info"), alert["alert"]
        assert alert["annotations"]["summary"]
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert page == "docs/operations.md"
        named.add(anchor)
    assert named == anchors  # a section that no alert leads to would be stale


FIRING: dict[str, dict[str, str]] = {
    "MoongateGatewayDown": {'up{job="moongate",gateway="g"}': "0x60"},
    "MoongateNoInstance": {'moongate_instance_up{gateway="g",instance="a"}': "0x60"},
    "MoongateInstanceDown": {
        'moongate_instance_up{gateway="g",instance="a"}': "0x60",
        'moongate_instance_up{gateway="g",instance="b"}': "1x60",
    },
    "MoongateServerErrors": {
        'moongate_requests_total{code="200"}': "0+100x60",
        'moongate_requests_total{code="502"}': "0+10x60",
    },
    "MoongateAnswersBrokenOff": {'moongate_broken_off_total{instance="a"}': "0+6x60"},
    "MoongateRequestsShed": {'moongate_rejected_total{reason="queue_full"}': "0+60x60"},
    "MoongateManyRetries": {
        'moongate_requests_total{code="200"}': "0+100x60",
        'moongate_retries_total{reason="status"}': "0+10x60",
    },
    "MoongateInstanceSlow": {'moongate_instance_slowness{instance="a"}': "4x60"},
    "MoongateBreakerOpens": {'moongate_breaker_openings_total{instance="a"}': "0+1x60"},
    "MoongateSlowFirstToken": {
        'moongate_ttft_seconds_bucket{instance="a",le="30"}': "0+1x60",
        'moongate_ttft_seconds_bucket{instance="a",le="60"}': "0+10x60",
        'moongate_ttft_seconds_bucket{instance="a",le="+Inf"}': "0+10x60",
    },
    "MoongateReadingFallsBehind": {'moongate_reading_requests{gateway="g"}': "300x60"},
    "MoongateQueueIsLong": {
        'moongate_queue_seconds_bucket{le="10"}': "0+1x60",
        'moongate_queue_seconds_bucket{le="15"}': "0+10x60",
        'moongate_queue_seconds_bucket{le="+Inf"}': "0+10x60",
    },
    "MoongatePromptsNotRead": {
        'moongate_requests_total{code="200"}': "0+100x60",
        'moongate_route_fallback_total{reason="budget"}': "0+50x60",
    },
    "MoongateIndexNotExact": {'moongate_index_trust{instance="a"}': "1x60"},
    "MoongateEventGaps": {'moongate_index_gaps_total{instance="a"}': "0+3x60"},
    "MoongateReuseMissing": {
        'moongate_prompt_tokens_total{source="device"}': "0+1000x60",
        'moongate_reuse_error_tokens_sum{direction="less"}': "0+500x60",
    },
    "MoongatePrefixesLost": {
        'moongate_prompt_tokens_total{source="recompute"}': "0+1000x60",
        'moongate_prefix_lost_tokens_total{cause="system"}': "0+500x60",
    },
    "MoongateHandoffsFail": {
        'moongate_pd_handoffs_total{result="handed_over"}': "0+10x60",
        'moongate_pd_handoffs_total{result="failed"}': "0+2x60",
    },
    "MoongatePoolDown": {'moongate_pool_up{gateway="g"}': "0x60"},
    "MoongatePoolKeysMismatch": {"moongate_pool_key_mismatch_total": "0x20 1x40"},
    "MoongatePoolFull": {"moongate_pool_bytes": "99x60", "moongate_pool_capacity_bytes": "100x60"},
    "MoongateRedisDown": {'moongate_redis_up{gateway="g"}': "0x60"},
    "MoongateReloadFailed": {
        'moongate_config_reloads_total{gateway="g",result="failed"}': "0x20 1x40"
    },
    "MoongateTracesLost": {'moongate_traces_total{gateway="g",result="failed"}': "0+5x60"},
}
"""For each alert, series by the minute with which it fires after half an hour, and no other does but
those of `ALSO`."""

ALSO = {"MoongateNoInstance": {"MoongateInstanceDown"}}

WELL = {
    'up{job="moongate",gateway="g"}': "1x60",
    'moongate_instance_up{gateway="g",instance="a"}': "1x60",
    'moongate_requests_total{code="200"}': "0+100x60",
    'moongate_requests_total{code="502"}': "0x60",
    'moongate_retries_total{reason="status"}': "0x60",
    'moongate_route_fallback_total{reason="budget"}': "0+1x60",
    'moongate_ttft_seconds_bucket{instance="a",le="1"}': "0+100x60",
    'moongate_ttft_seconds_bucket{instance="a",le="+Inf"}': "0+100x60",
    'moongate_index_trust{instance="a"}': "2x60",
    'moongate_index_trust{instance="without-events"}': "0x60",
    'moongate_index_events_total{instance="without-events",kind="stored"}': "0x60",
    'moongate_index_gaps_total{instance="a"}': "0x60",
    'moongate_prompt_tokens_total{source="device"}': "0+1000x60",
    'moongate_reuse_error_tokens_sum{direction="less"}': "0+10x60",
    'moongate_prefix_lost_tokens_total{cause="system"}': "0+10x60",
    'moongate_pd_handoffs_total{result="failed"}': "0x60",
    "moongate_pool_key_mismatch_total": "0x60",
    'moongate_pool_up{gateway="g"}': "1x60",
    'moongate_redis_up{gateway="g"}': "1x60",
    'moongate_config_reloads_total{gateway="g",result="ok"}': "0+1x60",
    'moongate_traces_total{gateway="g",result="sent"}': "0+100x60",
    'moongate_traces_total{gateway="g",result="failed"}': "0x60",
    'moongate_queue_requests{gateway="g"}': "3x60",
    'moongate_rejected_total{reason="queue_full"}': "0x60",
}


@needs_promtool
def test_each_alert_fires_when_it_should_and_none_else(tmp_path: Path) -> None:
    assert FIRING.keys() == {alert["alert"] for alert in alerts()}
    cases = [(name, series, {name} | ALSO.get(name, set())) for name, series in FIRING.items()]
    tests = [_rule_test(*case) for case in [*cases, ("none", WELL, set())]]
    files = [str(file) for file in sorted(RULES.glob("*.yml"))]
    file = tmp_path / "alerts_test.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": files, "evaluation_interval": "1m", "tests": tests})
    )
    promtool("test", "rules", file)


def _rule_test(name: str, series: dict[str, str], firing: set[str]) -> dict[str, Any]:
    samples = [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(firing)]
    expression = 'count by (alertname) (ALERTS{alertstate="firing"} > 0) > bool 0'
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [{"expr": expression, "eval_time": "30m", "exp_samples": samples}],
    }


# --- dashboards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda file: file.stem)
def test_a_dashboards_panels_say_what_they_show_and_do_not_overlap(dashboard: Path) -> None:
    whole = json.loads(dashboard.read_text())
    assert whole["uid"] == dashboard.stem
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["targets"], panel["title"]


def test_dashboards_ask_the_source_that_is_provisioned() -> None:
    provisioning = FOLDER / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())
    uids = {source["uid"] for source in sources["datasources"]}
    used = {panel["datasource"]["uid"] for file in DASHBOARDS for panel in panels(file)}
    assert used == uids
    assert yaml.safe_load((provisioning / "dashboards" / "moongate.yaml").read_text())["providers"]


def test_the_collectors_pipelines_have_parts_that_are_there() -> None:
    whole = yaml.safe_load((FOLDER / "otel-collector.yaml").read_text())
    for name, pipeline in whole["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= whole[kind].keys(), (name, kind)


def test_expressions_are_read_as_prometheus_would() -> None:
    read = Expression(
        "x",
        'sum by (a, b) (rate(m_total{c=~"x|y",d!="z"}[5m])) / ignoring (e) group_left ()'
        ' (up > 0 or n_bucket{f="by (g)"})',
        "{{a}} {{ h }}",
    )
    assert [(s.metric, set(s.labels)) for s in read.selectors] == [
        ("m_total", {"c", "d"}),
        ("up", set()),
        ("n_bucket", {"f"}),
    ]
    assert read.grouping_labels == {"a", "b", "e", "h"}


def test_no_rule_is_given_twice() -> None:
    names = [rule.get("alert", rule.get("record")) for rule in rules()]
    assert len(set(names)) == len(names)
