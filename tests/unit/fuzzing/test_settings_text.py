"""Configuration files of any text: settings, or problems that name the file and the line."""

from __future__ import annotations

import re

import yaml
from hypothesis import given
from hypothesis import strategies as st
from odd_values import damaged, objects, quick

from moongate.gateway.config.settings import Settings
from moongate.gateway.config.settings_text import SettingsError, parse_settings

WHOLE = b"""\
listen: {host: 127.0.0.1, port: 8000}
limits: {body_bytes_max: 67108864, upstream_timeout_s: 600}
auth: {admin_key_env: ADMIN_KEY}
policy: {name: kv_cost, options: {}}
tokenizer: {mode: "off"}
pool: {kind: mooncake, master: "10.0.0.1:50051"}
state: {kind: redis, url: "redis://${HOST:-localhost}:6379/0"}
instances:
  - {id: a, url: http://127.0.0.1:8101, role: both}
  - {id: b, url: http://127.0.0.1:8102, kv_events: tcp://127.0.0.1:5602}
health: {interval_s: 2, timeout_s: 1, down_after: 2, up_after: 1}
models: {aliases: {big: m}}
"""
FIELDS = objects(
    "listen", "limits", "auth", "policy", "tokenizer", "pool", "state", "instances", "health",
    "models", "aliases", "id", "url", "role", "host", "port", "kind", "name", "options", "mode",
    "master", "kv_events", "interval_s", "observability", "drain", "session", "header",
)  # fmt: skip
PLACE = re.compile(r"moongate\.yaml(:\d+)?: ")


def check(text: str) -> None:
    try:
        read = parse_settings(text, "moongate.yaml", {"ADMIN_KEY": "k" * 32})
    except SettingsError as error:
        lines = str(error).splitlines()
        assert lines
        assert PLACE.match(lines[0]), lines[0]
        return
    assert isinstance(read, Settings)


@quick
@given(text=damaged(WHOLE).map(lambda b: b.decode("utf-8", "replace")))
def test_a_damaged_file_is_read_or_its_problems_are_named(text: str) -> None:
    check(text)


@quick
@given(value=FIELDS)
def test_a_file_of_any_structure_is_read_or_its_problems_are_named(value: object) -> None:
    check(yaml.safe_dump(value, allow_unicode=True))


@quick
@given(text=st.text(alphabet="abc:-{}[]&*!|>'\"%@`#?,. \n\t\0\x85\ufeff0159~<", max_size=40))
def test_any_text_is_read_or_its_problems_are_named(text: str) -> None:
    check(text)
