"""The client libraries and agent frameworks that people use, unchanged, before real engines.

Each runs ten turns in an environment of its own (`sdks/loops.py`). Every turn after a session's first goes
home, and what routing predicts to be cached is what the engine reports.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from engine_metrics import counter
from processes import BLOCK_TOKENS, PROJECT, Child, EngineProcess, Serve
from sdk_scripts import run_script

EnginePair = tuple[EngineProcess, EngineProcess]

SCRIPT = Path(__file__).parent / "sdks" / "loops.py"

# How many sessions each begins: the Agents SDK's has a sub-agent.
LOOPS = {
    "openai_chat": 1,
    "openai_responses": 1,
    "openai_items": 1,
    "anthropic_messages": 1,
    "openai_agents": 2,
    "langgraph_agent": 1,
    "litellm_chat": 1,
    "pydantic_ai_agent": 1,
}


def run_loop(name: str, url: str) -> list[tuple[int, int]]:
    """Return the prompt and cached tokens that the engine reported for each call."""
    printed = run_script(SCRIPT, name, url, "tiny")
    return [(prompt, cached) for prompt, cached in json.loads(printed.splitlines()[-1])]


def check_loop(
    name: str, gateway: Child, engines: EnginePair, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run a loop and see that its session stays at home, with what was predicted."""
    for engine in engines:
        httpx.post(f"{engine.url}/reset_prefix_cache", trust_env=False)
    calls = run_loop(name, gateway.url)
    predicted = counter(gateway.url, "moongate_prompt_tokens_total", source="device")
    delivered = counter(gateway.url, "moongate_delivered_cached_tokens_total")
    homes = [
        counter(gateway.url, "moongate_routed_total", instance=i, reason="device_prefix")
        for i in ("a", "b")
    ]
    with capsys.disabled():
        print(f"\n{name}: {len(calls)} calls, {delivered:.0f} tokens cached as predicted", end=" ")
    assert len(calls) >= 10
    assert predicted == delivered == sum(cached for _, cached in calls) > 0
    assert counter(gateway.url, "moongate_route_fallback_total") == 0
    assert sum(homes) >= len(calls) - LOOPS[name]
    if LOOPS[name] == 1:
        assert max(homes) == sum(homes), "the session has one home"
        for (before, _), (_, cached) in itertools.pairwise(calls):
            assert cached >= before // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("name", LOOPS)
def test_an_agents_loop_stays_at_home(
    name: str, engines: EnginePair, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    check_loop(name, serve(engines), engines, capsys)


def test_messages_by_way_of_chats_stay_at_home_too(
    engines: EnginePair, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    instances = [
        {"id": "ab"[n], "url": engine.url, "messages": "chat"} for n, engine in enumerate(engines)
    ]
    check_loop("anthropic_messages", serve(engines, instances=instances), engines, capsys)


EXAMPLES = sorted(
    path for path in (PROJECT / "examples").glob("*.py") if path.name != "my_policy.py"
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_as_it_is(example: Path, engines: EnginePair, serve: Serve) -> None:
    assert len(example.read_text().splitlines()) <= 30
    gateway = serve(engines)
    assert run_script(example, MOONGATE_URL=gateway.url).strip()
    assert counter(gateway.url, "moongate_requests_total", code="200") > 0
    assert counter(gateway.url, "moongate_requests_total", code="400") == 0


@pytest.fixture(scope="module")
def simulated(start_stack: Callable[..., Child]) -> Child:
    return start_stack()


@pytest.mark.parametrize("name", ["openai_responses", "litellm_chat", "pydantic_ai_agent"])
def test_a_loop_without_tools_stays_at_home_in_a_simulated_fleet(
    name: str, simulated: Child
) -> None:
    url = simulated.url
    model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
    names = ("moongate_prompt_tokens_total", "moongate_delivered_cached_tokens_total")
    before = [counter(url, names[0], source="device"), counter(url, names[1])]
    calls = json.loads(run_script(SCRIPT, name, url, model).splitlines()[-1])
    predicted = counter(url, names[0], source="device") - before[0]
    delivered = counter(url, names[1]) - before[1]
    assert predicted == delivered == sum(cached for _, cached in calls) > 0
    assert counter(url, "moongate_route_fallback_total") == 0
    size = 16  # of the simulated engines' blocks
    for (prompt, _), (_, cached) in itertools.pairwise(calls):
        assert cached >= prompt // size * size
