"""The operators' schema: whatever is sent that it describes, or nearly, is answered as it says; never 5xx."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from processes import MOONGATE, Child, free_port
from schemathesis.checks import CHECKS, not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.timeout(60)

RULES = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
ENDLESS = ("/admin/live",)
UNASKED_URL = "http://127.0.0.1:9"
"""Of instances that are added: the gateway calls what it is told of, and nobody listens there."""

START_S = 20.0
ROUTES_MIN = 14
bounded = settings(
    derandomize=True, max_examples=12, deadline=None, database=None,
    phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """A gateway and a simulated engine, each in a process of its own."""
    directory = tmp_path_factory.mktemp("openapi")
    engine_port, port = free_port(), free_port()
    engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{port}"
    argv = [*MOONGATE, "sim-engine", "--port", str(engine_port), "--model", "m"]
    engine = Child.start(argv, engine_url, directory / "engine.log")
    file = directory / "moongate.yaml"
    file.write_text(yaml.safe_dump({"instances": [{"id": "a", "url": engine_url}]}))
    serve = [*MOONGATE, "serve", "-c", str(file), "--port", str(port)]
    child = Child.start(serve, url, directory / "gateway.log")
    try:
        child.wait_until("/ready", START_S)
        yield child
    finally:
        child.kill()
        engine.kill()


def test_every_route_answers_as_the_schema_says(gateway: Child) -> None:
    schema = schemathesis.openapi.from_url(f"{gateway.url}/admin/openapi.json")
    found = list(schema.get_all_operations())
    operations = [one.ok() for one in found if isinstance(one, Ok)]
    assert len(operations) == len(found), "a route that the schema tells wrongly"
    assert len(operations) >= ROUTES_MIN
    asked = 0
    for operation in operations:
        if operation.path in ENDLESS:
            continue
        modes = list(schemathesis.GenerationMode)
        cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in modes])

        @bounded
        @given(case=cases)
        def check(case: schemathesis.Case[Any]) -> None:
            nonlocal asked
            asked += 1
            if isinstance(case.body, dict) and isinstance(case.body.get("url"), str):
                case.body["url"] = UNASKED_URL
            case.validate_response(case.call(), checks=RULES)

        check()
    assert asked >= 5 * len(operations)
    log = gateway.log.read_text()
    assert "a bug of ours" not in log
    assert "Traceback" not in log
    # And it still does what it is for.
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, trust_env=False)
    assert answer.status_code == 200


def test_the_rules_are_among_those_that_schemathesis_has() -> None:
    """A renamed check would otherwise be no check."""
    assert {rule.__name__ for rule in RULES} <= set(CHECKS.get_all_names())
