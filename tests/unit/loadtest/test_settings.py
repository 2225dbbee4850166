"""Options of a load: from words to settings, and to words again for locust's process."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from moongate.loadtest.settings import (
    INTERNAL_OPTIONS,
    OPTIONS,
    Preset,
    WorkloadSettings,
    add_workload_arguments,
    duration,
    settings_from,
    words_of,
)
from moongate.loadtest.traces import TraceFormat
from moongate.loadtest.words import TokenCosts


def parse(*words: str) -> WorkloadSettings:
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser, (*OPTIONS, *INTERNAL_OPTIONS))
    return settings_from(parser.parse_args(words), seed=5)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--preset", "cold-burst", "--rate", "2.5", "--seed", "9", "--no-session-ids"),
        ("--preset", "trace", "--traces", "/t", "--trace-format", "mooncake", "--speed", "4"),
        ("--no-tools", "--own-system", "--think", "0.5", "--turns", "3", "--no-ignore-eos"),
        ("--token-costs", "1.25,4,5,3,200", "--model", "m", "--system-tokens", "0"),
        ("--context-max", "9000", "--shared-prompts", "7", "--first-tokens", "11"),
        ("--turn-tokens", "12", "--answer-tokens", "13"),
    ],
)
def test_settings_are_the_same_after_a_way_through_words(words: tuple[str, ...]) -> None:
    settings = parse(*words)
    assert parse(*words_of(settings)) == settings


def test_presets_have_sizes_of_their_own_and_options_replace_them() -> None:
    assert parse().shape.system_tokens == 10_000
    assert parse("--preset", "shared-prompt").shape.system_tokens == 8_000
    assert parse("--system-tokens", "12").shape.system_tokens == 12
    assert parse().seed == 5
    assert parse("--token-costs", "1,2,3,4,5").costs == TokenCosts(1.0, 2, 3, 4, 5)
    trace = parse("--preset", "trace", "--traces", "/t", "--trace-format", "agentic")
    assert (trace.preset, trace.traces) == (Preset.TRACE, Path("/t"))
    assert trace.trace_format is TraceFormat.AGENTIC


def test_a_trace_preset_without_traces_is_misused() -> None:
    with pytest.raises(ValueError, match="needs --traces"):
        parse("--preset", "trace")
    with pytest.raises(ValueError, match="--traces: only with --preset trace"):
        parse("--traces", "/t")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("60s", 60.0), ("10m", 600.0), ("1h30m", 5400.0), ("1.5s", 1.5)]
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "abc", "10 m", "-5s", "1d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        duration(text)


@pytest.mark.parametrize(
    "words",
    [("--rate", "0"), ("--rate", "nan"), ("--turns", "0"), ("--preset", "x"), ("--seed", "-1"),
     ("--token-costs", "1,2")],
)  # fmt: skip
def test_values_out_of_range_are_misuse(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
