"""The configuration file: what it may say, and the line that each wrong value gets."""

import json
from pathlib import Path

import pytest

from moongate.gateway.config.settings import Settings
from moongate.gateway.config.settings_text import SettingsError, load_settings, parse_settings
from moongate.router import SeedingLimits
from moongate.router.handoff import HandoffKind

ONE = "instances:\n  - {id: a, url: http://127.0.0.1:8101}\n"


def parse(text: str, **environment: str) -> Settings:
    return parse_settings(text, "m.yaml", environment)


def problems_of(text: str, **environment: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as refused:
        parse(text, **environment)
    return refused.value.problems


def instance(fields: str) -> str:
    return "instances:\n  - {id: a, url: http://127.0.0.1:8101, " + fields + "}\n"


# --- what is right --------------------------------------------------------------------------------

FULL = """\
listen: {host: 127.0.0.1, port: 8000}
limits: {body_bytes_max: 67108864, queue_requests_max: 1024, upstream_timeout_s: 600, \
connect_timeout_s: 5, headers_bytes_max: 65536, allow_kv_transfer_params: false}
auth: {forward_client_key: false, admin_key_env: null}
policy:
  name: kv_cost
  options: {}
  allow_override: false
tokenizer: {mode: auto, budget_ms: 200, forward_ids: auto}
session: {header: null}
pool: {kind: none}
state: {kind: memory}
instances:
  - {id: a, url: http://127.0.0.1:8101, role: both}
  - {id: b, url: http://127.0.0.1:8102, kv_events: tcp://127.0.0.1:5602, \
kv_replay: tcp://127.0.0.1:6602, models: [m], ranks: 2, weight: 2, block_size: 64}
discovery: {kind: static}
observability: {otlp_endpoint: null, receipt_headers: true, stream_usage: asked, keep_text: false}
health: {interval_s: 2, timeout_s: 1, down_after: 2, up_after: 1}
drain: {limit_s: 300}
"""


def test_the_contracts_example_says_what_the_defaults_are() -> None:
    full, bare = parse(FULL).model_dump(), parse(ONE).model_dump()
    instances = full.pop("instances")
    assert full == {key: value for key, value in bare.items() if key != "instances"}
    assert instances[0] == bare["instances"][0]
    assert instances[1] == {
        "id": "b",
        "url": "http://127.0.0.1:8102",
        "role": "both",
        "pool": None,
        "messages": "auto",
        "tls": None,
        "kv_connector": "auto",
        "bootstrap_url": None,
        "kv_events": "tcp://127.0.0.1:5602",
        "kv_replay": "tcp://127.0.0.1:6602",
        "ranks": 2,
        "block_size": 64,
        "models": ["m"],
        "weight": 2.0,
        "api_key_env": None,
    }


@pytest.mark.parametrize(
    ("ranks", "numbers"), [("null", None), ("3", (0, 1, 2)), ("[4, 5]", (4, 5))]
)
def test_ranks_are_a_number_or_a_list(ranks: str, numbers: tuple[int, ...] | None) -> None:
    assert parse(instance(f"ranks: {ranks}")).instances[0].rank_numbers == numbers


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://engine:8101/", "http://engine:8101"),
        ("HTTP://Engine:8101", "http://engine:8101"),
        ("https://engine", "https://engine"),
        ("http://[::1]:8101", "http://[::1]:8101"),
    ],
)
def test_a_url_is_kept_in_one_spelling(url: str, kept: str) -> None:
    assert parse(f"instances:\n  - {{id: a, url: '{url}'}}\n").instances[0].url == kept


def test_a_wildcard_address_is_left_for_the_instances_host() -> None:
    assert parse(instance("kv_events: 'tcp://*:5601'")).instances[0].kv_events == "tcp://*:5601"


def test_a_header_name_is_compared_in_lower_case() -> None:
    assert parse("session: {header: X-Agent}\n" + ONE).session.header == "x-agent"


@pytest.mark.parametrize(
    ("given", "way"),
    [("auto", "auto"), ("on", "on"), ("off", "off"), ("'on'", "on"), ("'off'", "off")],
)
def test_token_ids_are_handed_on_or_not_however_yaml_reads_it(given: str, way: str) -> None:
    assert parse(f"tokenizer: {{forward_ids: {given}}}\n" + ONE).tokenizer.forward_ids == way


def test_the_usage_of_streams_can_be_asked_for_always() -> None:
    settings = parse("observability: {stream_usage: always}\n" + ONE)
    assert settings.observability.stream_usage == "always"


def test_an_engines_key_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_TEST_KEY", "secret")
    assert parse(instance("api_key_env: MOONGATE_TEST_KEY")).instances[0].api_key_env == (
        "MOONGATE_TEST_KEY"
    )


# --- C96: wrong values ----------------------------------------------------------------------------

POLICIES = (
    "kv_cost, least_loaded, module:Class, power_of_two, prefix_affinity, random, round_robin, "
    "session_hash"
)
SECTIONS = (
    "admission, auth, breaker, discovery, drain, health, instances, limits, listen, models, observability, policy, pool, "
    "responses, session, state, tokenizer"
)


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (
            "policy:\n  name: kv_cst\n",
            (f"2: policy.name: unknown policy (did you mean kv_cost?); known here: {POLICIES}; "
            "got 'kv_cst'"),
        ),
        (
            "policy: kv_awre\n",
            "1: policy: expected keys and values; known here: name, options, allow_override",
        ),
        (
            "policy: {options: {wieght: 1}}\n",
            ("1: policy: policy kv_cost has no option 'wieght'; known: active_request_ms, "
            "again_weight, approximate_weight, degraded_weight, fetch_ms, "
            "handoff_ms, history_weight, session_ms, stall_ms, stall_weight"),
        ),
        (
            "tokenizer: {forward_ids: always}\n",
            "1: tokenizer.forward_ids: Input should be 'auto', 'on' or 'off'; got 'always'",
        ),
        (
            "observability: {stream_usage: never}\n",
            "1: observability.stream_usage: Input should be 'asked' or 'always'; got 'never'",
        ),
        (
            "limits: {connections_per_instance_max: 0}\n",
            ("1: limits.connections_per_instance_max: Input should be greater than or equal to 1; "
            "got 0"),
        ),
        ("health:\n  interval_s: 0\n", "2: health.interval_s: Input should be greater than 0; got 0"),
        (
            "limits: {upstream_timeout_s: .inf}\n",
            "1: limits.upstream_timeout_s: Input should be a finite number; got inf",
        ),
        (
            "session: {header: 'bad name'}\n",
            ("1: session.header: expected the name of an HTTP header, such as x-agent-session; "
            "got 'bad name'"),
        ),
        (
            'session: {header: "x-a\\n"}\n',
            ("1: session.header: expected the name of an HTTP header, such as x-agent-session; "
            "got 'x-a\\n'"),
        ),
        ("polcy: x\n", f"1: polcy: unknown key (did you mean policy?); known here: {SECTIONS}"),
        ("breaker: {open_s: 40}\n", "1: breaker: open_s_max: expected open_s (40) or more"),
        ("health_interval: 0\n", f"1: health_interval: unknown key; known here: {SECTIONS}"),
        (
            "listen:\n  prot: 1\n",
            "2: listen.prot: unknown key (did you mean port?); known here: host, port, tls",
        ),
        (
            "tokenizer: {mode: lcal}\n",
            ("1: tokenizer.mode: Input should be 'auto', 'local', 'remote' or 'off'; got 'lcal' "
            "(did you mean local?)"),
        ),
        (
            "tokenizer: {path: /nowhere}\n",
            "1: tokenizer: path: /nowhere has no tokenizer.json",
        ),
        (
            "listen: {port: 70000}\n",
            "1: listen.port: Input should be less than or equal to 65535; got 70000",
        ),
        ("listen: {port: '80'}\n", "1: listen.port: Input should be a valid integer; got '80'"),
        (
            "limits: {body_bytes_max: true}\n",
            "1: limits.body_bytes_max: Input should be a valid integer; got True",
        ),
        (
            "listen:\n\tport: 1\n",
            ("2: not YAML: found character '\\t' that cannot start any token "
            "(YAML wants spaces, not tabs)"),
        ),
        ("listen: {port: 1, port: 2}\n", "1: listen.port: given twice"),
        ("drain: {}\nlisten: {}\ndrain: {}\n", "3: drain: given twice"),
        (
            "models:\n  aliases: {a: b, b: c}\n",
            "1: models: aliases: a names b, which is an alias itself",
        ),
        (
            "models:\n  aliases: {a: ''}\n",
            "1: models: aliases: expected names, such as my-model: served-model",
        ),
    ],
)  # fmt: skip
def test_c96_a_wrong_value_gets_file_line_key_and_what_is_right(head: str, problem: str) -> None:
    assert problems_of(head + ONE) == (f"m.yaml:{problem}",)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("weight: -1", "0.weight: Input should be greater than 0; got -1"),
        ("weight: .nan", "0.weight: Input should be a finite number; got nan"),
        (
            "role: prefil",
            (
                "0.role: Input should be 'both', 'prefill' or 'decode'; got 'prefil' "
                "(did you mean prefill?)"
            ),
        ),
        (
            "kv_connector: moncake",
            (
                "0.kv_connector: Input should be 'auto', 'mooncake' or 'nixl'; got 'moncake' "
                "(did you mean mooncake?)"
            ),
        ),
        (
            "role: prefill, kv_connector: mooncake",
            (
                "0: kv_connector: mooncake needs the bootstrap_url of a prefill instance, such as "
                "http://127.0.0.1:8998"
            ),
        ),
        (
            "role: prefill, kv_connector: nixl, bootstrap_url: 'http://h:8998'",
            "0: bootstrap_url: NIXL has none; leave it out, or kv_connector",
        ),
        (
            "role: decode, bootstrap_url: 'http://h:8998'",
            "0: bootstrap_url: only instances that prefill have one",
        ),
        (
            "role: prefill, bootstrap_url: 'h:8998'",
            "0.bootstrap_url: expected http://host:port; got 'h:8998'",
        ),
        ("ranks: [0, 0]", "0: ranks: a rank is named twice"),
        ("ranks: [0, x]", "0.ranks: Input should be a valid integer"),
        ("kv_replay: 'tcp://*:1'", "0: kv_replay without kv_events"),
        (
            "kv_events: 'tcp://*:0'",
            (
                "0.kv_events: KV events at tcp://*:0: expected tcp://host:port with a fixed port; "
                "got 'tcp://*:0'"
            ),
        ),
        ("api_key_env: NOT_SET_1", "0: api_key_env: the variable NOT_SET_1 is not set"),
        (
            "rank: 1",
            (
                "0.rank: unknown key (did you mean ranks?); known here: api_key_env, block_size, "
                "bootstrap_url, id, "
                "kv_connector, kv_events, kv_replay, messages, models, pool, ranks, role, tls, url, weight"
            ),
        ),
    ],
)
def test_c96_a_wrong_value_of_an_instance_names_it(fields: str, problem: str) -> None:
    assert problems_of(instance(fields))[0] == f"m.yaml:2: instances.{problem}"


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8101", "ftp://h:1", "http://", "http://h:1/v1", "http://h:1?q", "http://u@h:1"),
        *("http://\N{SNOWMAN}:1", "http://[::1", "http://[zz]:1"),
        *("http://@h:1", "http://h:0", "http://h:99999", "http://h:x", "http://h:", "http://h :1"),
        "http://[::1:1",
    ],
)  # fmt: skip
def test_c96_a_url_that_can_not_be_reached_is_refused(url: str) -> None:
    (problem,) = problems_of(f"instances:\n  - {{id: a, url: '{url}'}}\n")
    assert problem.startswith("m.yaml:2: instances.0.url: ")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "é", "a" * 65])
def test_an_id_is_a_short_plain_name(name: str) -> None:
    (problem,) = problems_of(f"instances:\n  - {{id: '{name}', url: http://h:1}}\n")
    assert problem.startswith("m.yaml:2: instances.0.id: ")


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("{id: a, url: http://h:2}", "id a"),
        ("{id: b, url: 'http://H:1/'}", "url http://h:1"),
        ("{id: b, url: 'http://h:80'}\n  - {id: c, url: 'http://h'}", "url http://h"),
    ],
)
def test_an_id_or_url_used_twice_is_refused(second: str, what: str) -> None:
    text = f"drain: {{}}\ninstances:\n  - {{id: a, url: http://h:1}}\n  - {second}\n"
    assert problems_of(text) == (f"m.yaml:2: instances: the {what} is used twice",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", ":1: expected keys and values, such as instances: [...]"),
        ("- a\n", ":1: expected keys and values, such as instances: [...]"),
        ("listen: {}\n", ":1: instances: missing; it must be given, [] if all announce themselves"),
        ("instances:\n  - {id: a}\n", ":2: instances.0.url: missing; it must be given"),
        ("a: [\n", ":2: not YAML: expected the node content, but found '<stream end>'"),
        (
            "listen: {host: !x y}\n",
            ":1: listen.host: can't be read: could not determine a constructor for the tag '!x'",
        ),
        (
            "listen: {host: 2001-99-99}\n",
            ":1: listen.host: can't be read: month must be in 1..12",
        ),
    ],
)
def test_c96_a_file_of_another_form_gets_one_line(text: str, problem: str) -> None:
    assert problems_of(text) == (f"m.yaml{problem}",)


@pytest.mark.parametrize("text", ["${MODEL-x}", "${my model}", "a${", "${A}${", "${}"])
def test_what_begins_like_a_variable_is_one(text: str) -> None:
    told = problems_of(f"policy: {{name: '{text}'}}\ninstances: []\n", A="a")
    assert told == (
        "m.yaml:1: policy.name: ${ begins a variable: expected ${NAME} or ${NAME:-default}",
    )


def test_instances_may_be_left_out_where_they_are_found() -> None:
    found = {"discovery": {"kind": "dns", "name": "engines.local", "port": 8000}}
    assert Settings.model_validate(found).instances == []


def test_c96_a_forbidden_character_gets_one_line() -> None:
    (problem,) = problems_of("\x00")
    assert problem.startswith("m.yaml: not YAML: unacceptable character #x0000")
    assert "\n" not in problem


def test_an_alias_that_contains_itself_has_an_end() -> None:
    (problem,) = problems_of("listen: &a {x: *a}\n" + ONE)
    assert problem.endswith(": nested too deeply")


def test_all_problems_are_told_at_once() -> None:
    problems = problems_of("listen: {port: -1}\nhealth: {up_after: 0}\n" + ONE)
    assert [problem.split(": ")[1] for problem in problems] == ["listen.port", "health.up_after"]


# --- what is shared -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "section",
    [
        "pool: {kind: none}",
        "pool: {}",
        "state: {kind: memory, url: null}",
        "discovery: {kind: static}",
    ],
)
def test_what_happens_anyway_may_be_said(section: str) -> None:
    assert parse(f"{section}\n{ONE}") == parse(ONE)


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ("state: {kind: redis}", "state: url: expected redis://host:port/number, for kind: redis"),
        (
            "state: {kind: redis, url: 'http://x:1'}",
            "state: url: expected redis://host:port/number, for kind: redis",
        ),
        ("state: {url: 'redis://x:1'}", "state: url: only with kind: redis"),
        *(
            (
                f"state: {{kind: redis, url: '{url}'}}",
                "state: url: expected redis://host:port/number, for kind: redis",
            )
            for url in (
                "redis://h:abc/0",
                "redis://h:99999",
                "redis://h:1/x",
                "redis://h:1/0?foo=1",
                "redis://",
                "redis://[::1:6379/0",
                "unix:///x",
            )
        ),
        (
            "observability: {stream_usge: asked}",
            (
                "observability.stream_usge: unknown key (did you mean stream_usage?); known here: "
                "decisions_max, keep_text, log_format, otlp_endpoint, otlp_headers_env, "
                "receipt_headers, sample_ratio, stream_usage"
            ),
        ),
    ],
)
def test_what_asks_for_more_is_refused_by_name(section: str, problem: str) -> None:
    assert problems_of(f"{section}\n{ONE}") == (f"m.yaml:1: {problem}",)


# --- the pool -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        (
            "pool: {kind: mooncake}",
            "pool: kind mooncake needs admin_url: http://host:9003, or master: host:port",
        ),
        (
            "pool: {master: 'h:1'}",
            "pool: master and admin_url are of kind mooncake, not none",
        ),
        (
            "pool: {kind: mooncake, master: 'http://h:1'}",
            "pool: master: expected host:port, such as 127.0.0.1:50051",
        ),
        (
            "pool: none",
            (
                "pool: expected keys and values; known here: kind, master, admin_url, "
                "lookup_budget_ms, hash_seeds, cache_prefix, namespace, shards, seeding"
            ),
        ),
        (
            "pool: {seeding: {enabled: on}}",
            "pool: seeding.enabled: on needs a pool; kind is none",
        ),
        (
            "pool: {kind: memory, seeding: {enabled: maybe}}",
            "pool.seeding.enabled: Input should be 'auto', 'on' or 'off'; got 'maybe'",
        ),
        (
            "pool: {kind: memory, seeding: {at_once_max: 0}}",
            ("pool.seeding.at_once_max: Input should be greater than or equal to 1; got 0"),
        ),
        (
            "pool: {kind: memory, seeding: {pool_use_max: 1.5}}",
            "pool.seeding.pool_use_max: Input should be less than or equal to 1; got 1.5",
        ),
        (
            "pool: {kind: memory, seeding: {per_minut_max: 9}}",
            (
                "pool.seeding.per_minut_max: unknown key (did you mean per_minute_max?); known here:"
                " at_once_max, busy_requests, demand_per_s_min, enabled, kv_use_max, per_minute_max,"
                " pool_use_max, prefix_tokens_min"
            ),
        ),
    ],
)
def test_a_pool_that_cant_be_reached_is_refused(section: str, problem: str) -> None:
    assert problems_of(f"{section}\n{ONE}") == (f"m.yaml:1: {problem}",)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("master: 'h:65536'", "pool: master: expected host:port, such as 127.0.0.1:50051"),
        (
            "shards: {tp: 256, pp: 17}",
            "pool.shards: tp x pcp x dcp x pp x groups are 4352 parts, 4096 at most",
        ),
        (
            "cache_prefix: 'a,b'",
            (
                "pool.cache_prefix: expected visible ASCII characters without a comma, 256 at most;"
                " got 'a,b'"
            ),
        ),
        (
            "namespace: 'a b'",
            (
                "pool.namespace: expected visible ASCII characters without a comma, 256 at most;"
                " got 'a b'"
            ),
        ),
        ("hash_seeds: [true]", "pool.hash_seeds.0: Input should be a valid string; got True"),
    ],
)
def test_what_no_pool_has_is_refused(fields: str, problem: str) -> None:
    master = "" if "master" in fields else "master: 'h:1', "
    assert problems_of(f"pool: {{kind: mooncake, {master}{fields}}}\n{ONE}") == (
        f"m.yaml:1: {problem}",
    )


def test_what_names_keys_is_text_and_seeds_may_be_numbers() -> None:
    fields = "hash_seeds: [0, '7'], cache_prefix: 'a&b', namespace: '@store_tp:2'"
    pool = parse(f"pool: {{kind: mooncake, master: 'h:65535', {fields}}}\n{ONE}").pool
    assert pool.hash_seeds == ["0", "7"]
    assert (pool.cache_prefix, pool.namespace) == ("a&b", "@store_tp:2")


def test_a_block_may_have_4096_parts() -> None:
    shards = parse(f"pool: {{kind: memory, shards: {{tp: 256, pp: 16}}}}\n{ONE}").pool.shards
    assert shards is not None
    assert len(shards.as_shards()) == 4096


def test_an_empty_key_of_an_engine_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONGATE_TEST_KEY", "")
    (problem,) = problems_of(instance("api_key_env: MOONGATE_TEST_KEY"))
    assert problem.endswith("api_key_env: the variable MOONGATE_TEST_KEY is not set")


def test_the_pools_http_interface_is_at_its_usual_port_unless_told() -> None:
    told = parse(f"pool: {{kind: mooncake, admin_url: 'http://m:9100'}}\n{ONE}").pool
    assert told.master_url == "http://m:9100"
    usual = parse(f"pool: {{kind: mooncake, master: '10.0.0.1:50051'}}\n{ONE}").pool
    assert usual.master_url == "http://10.0.0.1:9003"


def test_what_may_be_seeded_is_bounded_by_the_operator() -> None:
    pool = "pool: {kind: memory, seeding: {enabled: ENABLED, at_once_max: 2, pool_use_max: 0.5}}"
    limits = parse(f"{pool.replace('ENABLED', 'auto')}\n{ONE}").pool.seeding.limits
    assert limits == SeedingLimits(at_once_max=2, pool_use_max=0.5)
    limits = parse(f"{pool.replace('ENABLED', 'on')}\n{ONE}").pool.seeding.limits
    assert limits == SeedingLimits(at_once_max=2, pool_use_max=0.5, needs_pool_use=False)
    assert parse(f"{pool.replace('ENABLED', 'off')}\n{ONE}").pool.seeding.limits is None
    assert parse(f"pool: {{kind: memory}}\n{ONE}").pool.seeding.limits == SeedingLimits()


# --- variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "environment", "host"),
    [
        ("${H}", {"H": "h"}, "h"),
        ("a-${H}.${D:-lan}", {"H": "h"}, "a-h.lan"),
        ("${H:-x}", {"H": ""}, "x"),
        ('"${H}"', {"H": "[x"}, "[x"),
        ("${H}", {"H": "[x"}, "[x"),
        ("${H}", {"H": "a: b"}, "a: b"),
        ("${H}", {"H": "${OTHER}"}, "${OTHER}"),
        ("$H", {"H": "h"}, "$H"),
    ],
)
def test_variables_expand_in_strings(text: str, environment: dict[str, str], host: str) -> None:
    assert parse(f"listen:\n  host: {text}\n{ONE}", **environment).listen.host == host


def test_a_plain_value_from_a_variable_has_the_type_it_looks_like() -> None:
    settings = parse(
        f"listen:\n  port: ${{P}}\nhealth:\n  interval_s: ${{S:-0.5}}\n"
        f"observability:\n  receipt_headers: ${{R}}\n{ONE}",
        P="9",
        R="false",
    )
    assert settings.listen.port == 9
    assert settings.health.interval_s == 0.5
    assert settings.observability.receipt_headers is False


def test_a_quoted_value_from_a_variable_stays_a_string() -> None:
    (problem,) = problems_of('listen:\n  port: "${P}"\n' + ONE, P="9")
    assert problem == "m.yaml:2: listen.port: Input should be a valid integer; got '9'"


def test_a_variable_that_is_not_set_is_named() -> None:
    assert problems_of("listen:\n  host: ${NO_SUCH}\n" + ONE) == (
        (
            "m.yaml:2: listen.host: the variable NO_SUCH is not set "
            "(give a default with ${NO_SUCH:-value})"
        ),
    )


# --- files ----------------------------------------------------------------------------------------


def test_a_files_problems_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "moongate.yaml"
    file.write_text("instances: {}\n")
    with pytest.raises(SettingsError, match=f"^{file}:1: instances: "):
        load_settings(file)


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_file_that_can_not_be_read_says_so(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "moongate.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"^{file}: can't be read: "):
        load_settings(file)


# --- prefill and decode apart -----------------------------------------------------------------------


def fleet(*instances: str) -> str:
    lines = [
        f"  - {{id: {'abcd'[n]}, url: 'http://h:{n + 1}', {fields}}}\n"
        for n, fields in enumerate(instances)
    ]
    return "instances:\n" + "".join(lines)


@pytest.mark.parametrize(
    "partners",
    [
        ("role: decode",),
        ("role: both",),
        ("role: decode, models: [other]", "role: decode, models: [x, m]"),
        ("role: prefill", "role: decode"),
    ],
)
def test_a_prefill_instance_needs_one_that_decodes(partners: tuple[str, ...]) -> None:
    assert parse(fleet("role: prefill, models: [m]", *partners)).instances[0].role == "prefill"


@pytest.mark.parametrize(
    "partners",
    [(), ("role: prefill",), ("role: decode, models: [other]",), ("role: both, models: [x, y]",)],
)
def test_a_prefill_instance_without_a_partner_for_its_model_is_refused(
    partners: tuple[str, ...],
) -> None:
    (problem,) = problems_of(fleet("role: prefill, models: [m]", *partners))
    assert problem == (
        "m.yaml:1: instances: a only prefills: it needs an instance of role decode or both for the "
        "same model"
    )


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ("kv_connector: auto", HandoffKind.NIXL),
        ("bootstrap_url: 'http://h:8998'", HandoffKind.MOONCAKE),
        ("kv_connector: mooncake, bootstrap_url: 'http://h:8998'", HandoffKind.MOONCAKE),
        ("kv_connector: nixl", HandoffKind.NIXL),
    ],
)
def test_a_bootstrap_server_tells_the_connector_unless_it_is_named(
    fields: str, kind: HandoffKind
) -> None:
    settings = parse(fleet(f"role: prefill, {fields}", "role: decode"))
    assert settings.instances[0].handoff is kind


# --- traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "posted_to"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://host/otlp", "https://host/otlp/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ],
)
def test_traces_are_posted_below_the_endpoint(endpoint: str, posted_to: str) -> None:
    settings = parse(f"observability: {{otlp_endpoint: '{endpoint}'}}\n{ONE}")
    assert settings.observability.otlp_endpoint == posted_to


def test_an_endpoint_that_a_variable_leaves_out_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTLP_X", raising=False)
    settings = parse(f"observability: {{otlp_endpoint: '${{OTLP_X:-}}'}}\n{ONE}")
    assert settings.observability.otlp_endpoint is None


@pytest.mark.parametrize(
    "endpoint",
    ["collector:4318", "grpc://c:4317", "http://u:p@c:1", "http://c:1/?k=v", "http://c/\n"],
)
def test_c96_an_endpoint_that_can_not_be_posted_to_is_refused(endpoint: str) -> None:
    (problem,) = problems_of(f"observability: {{otlp_endpoint: {json.dumps(endpoint)}}}\n{ONE}")
    assert problem.startswith("m.yaml:1: observability.otlp_endpoint: expected http://host:4318")


@pytest.mark.parametrize("ratio", ["-0.1", "1.1", ".nan"])
def test_c96_a_share_lies_between_none_and_all(ratio: str) -> None:
    (problem,) = problems_of(f"observability: {{sample_ratio: {ratio}}}\n{ONE}")
    assert problem.startswith("m.yaml:1: observability.sample_ratio: Input should be")


def test_headers_for_a_collector_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"observability: {{otlp_headers_env: OTLP_KEYS}}\n{ONE}"
    monkeypatch.delenv("OTLP_KEYS", raising=False)
    assert problems_of(text) == ("m.yaml:1: observability: otlp_headers_env: OTLP_KEYS is not set",)
    monkeypatch.setenv("OTLP_KEYS", "authorization=Bearer%20k1, x-scope=a")
    headers = parse(text).observability.otlp_headers
    assert headers == {"authorization": "Bearer k1", "x-scope": "a"}


@pytest.mark.parametrize("secret", ["k1", "a b=k1", "a=k1%0d%0ax: y", "a=ok,=k1"])
def test_malformed_headers_are_refused_without_showing_them(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTLP_KEYS", secret)
    (problem,) = problems_of(f"observability: {{otlp_headers_env: OTLP_KEYS}}\n{ONE}")
    assert "expected NAME=VALUE" in problem
    assert "k1" not in problem


def test_c96_a_log_format_is_one_of_two() -> None:
    (problem,) = problems_of(f"observability: {{log_format: jsn}}\n{ONE}")
    assert problem == (
        "m.yaml:1: observability.log_format: Input should be 'text' or 'json'; got 'jsn' "
        "(did you mean json?)"
    )
