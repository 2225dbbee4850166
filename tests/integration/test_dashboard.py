"""The dashboard in a real browser, before a simulated fleet with traffic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from axe_core_python.selenium import Axe
from browser import CHROMIUM, DRIVER, MISSING, Browser, browser
from processes import MOONGATE, Child, free_port, stack_up, start_gateway, until
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(not CHROMIUM or not DRIVER, reason=MISSING),
    # What selenium and its parts leave open is not ours to close.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

EVIL = "<img src=x onerror=window.hurt=1>"
LONG_KEY = "a-very-long-key-of-a-session-" + "0123456789" * 12
KEY = "s3cret-key"
DESKTOP, PHONE, NARROW = (1280, 900), (390, 844), (320, 640)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a browser for all tests here: to start one takes a second."""
    with browser(tmp_path_factory.mktemp("profile")) as running:
        running.open("about:blank")
        yield running


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """Return a stack of three simulated engines that has served some sessions."""
    with stack_up(tmp_path_factory.mktemp("up")) as child:
        send_turns(child.url)
        yield child


@pytest.fixture(autouse=True)
def fresh(page: Browser) -> Iterator[None]:
    """Begin each test at a desktop's size, and end it without a word of complaint in the console."""
    page.set_size(*DESKTOP)
    page.prefer(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    page.errors()
    yield
    page.open("about:blank")


def send_turns(url: str, model: str = "sim", turns: int = 3) -> None:
    """Send a few sessions of several turns: with keys, without, and with one that changes its past."""
    sessions = {key: f"{key} begins with this. " * 150 for key in ("one", EVIL, LONG_KEY, "")}
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        for turn in range(turns):
            for key, text in sessions.items():
                past = f"Changed. {text}" if key == "one" and turn == turns - 1 else text
                asked = [f"And more, {number}. " * 40 for number in range(turn + 1)]
                body = {
                    "model": model,
                    "messages": [
                        {"role": "system", "content": past},
                        *({"role": "user", "content": content} for content in asked),
                    ],
                    "max_tokens": 2,
                }
                headers = {"x-session-id": key} if key else {}
                answer = client.post("/v1/chat/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text


def show(page: Browser, url: str) -> None:
    """Open the dashboard and wait for its first frame."""
    page.open(f"{url}/ui")
    until(lambda: page.text("#connection-text") == "live")


def metric(url: str, name: str, **labels: str) -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(w in line for w in wanted))


def number(page: Browser, name: str) -> str:
    return page.text(f'#numbers [data-name="{name}"] dd')


def state_of(page: Browser, instance: str) -> str:
    return page.text(f'#fleet [data-key="{instance}"] .pill')


def is_in(page: Browser, instance: str, state: str) -> bool:
    return state_of(page, instance) == state


# --- what it shows --------------------------------------------------------------------------------


def test_it_loads_without_complaints_and_asks_nobody_else(page: Browser, fleet: Child) -> None:
    before = len(page.requested())
    show(page, fleet.url)
    until(lambda: page.find_all("#slowest details"))
    live = f"{fleet.url}/admin/live"
    until(lambda: page.pieces_of(live) >= 3)  # some frames
    assert page.errors() == []
    asked = page.requested()[before:]
    assert live in asked
    assert {url for url in asked if not url.startswith((fleet.url, "about:"))} == set()


def test_its_numbers_are_those_of_the_metrics(page: Browser, fleet: Child) -> None:
    show(page, fleet.url)
    until(lambda: number(page, "requests") == f"{metric(fleet.url, 'moongate_requests_total'):.0f}")
    source = {
        name: metric(fleet.url, "moongate_prompt_tokens_total", source=name)
        for name in ("device", "pool", "recompute")
    }
    reuse = 100 * (source["device"] + source["pool"]) / sum(source.values())
    assert number(page, "reuse") == f"{reuse:.1f} %"
    delivered = metric(fleet.url, "moongate_delivered_cached_tokens_total")
    assert 10_000 < delivered < 99_950
    assert number(page, "delivered") == f"{delivered / 1000:.1f} k"
    for name in ("engine-a", "engine-b", "engine-c"):
        blocks = metric(fleet.url, "moongate_index_blocks", instance=name, tier="device")
        assert (
            page.text(f'#fleet [data-key="{name}"] [data-key="device blocks"] dd')
            == f"{blocks:.0f}"
        )
    cells = page.run(
        "return [...document.querySelectorAll('#reuse-rows tr')].map("
        "r => [...r.children].slice(1).map(c => Number(c.textContent.replaceAll(',', ''))))"
    )
    assert [sum(column) for column in zip(*cells, strict=True)] == list(source.values())


def test_who_holds_what_and_where_turns_went_can_be_read_as_text(
    page: Browser, fleet: Child
) -> None:
    show(page, fleet.url)
    lanes = page.run(
        "return [...document.querySelectorAll('#lanes [role=img]')].map(e => e.ariaLabel)"
    )
    held, decided = "\n".join(lanes[::2]), "\n".join(lanes)
    assert "one " in held
    assert EVIL in held
    assert "holds the prefix" in decided or "No decision in the last minute" in decided
    assert len(page.find_all("#decisions tr")) == 12
    page.find("#slowest summary").click()
    receipt = page.text("#slowest details")
    for said in ("(chosen)", "(runner-up)", "the engine reused", "first token after", "queue"):
        assert said in receipt
    report = page.text("#divergences")
    assert "one" in report
    assert "the system prompt was changed" in report
    assert "the engine" not in report


def test_texts_of_clients_are_shown_as_text(
    page: Browser, tmp_path: Path, serve: Callable[..., Child]
) -> None:
    gateway = serve(model=EVIL)
    send_turns(gateway.url, EVIL)
    show(page, gateway.url)
    until(lambda: EVIL in page.text("#sessions"))
    for place in ("#about", "#fleet", "#sessions", "#decisions", "#slowest"):
        assert EVIL in page.text(place), place
    assert page.run("return window.hurt ?? null") is None
    assert page.run("return document.querySelectorAll('main img').length") == 0
    assert LONG_KEY not in page.text("main")
    assert LONG_KEY[:20] in page.text("#sessions")
    assert page.errors() == []


def test_before_the_first_request_it_says_so(page: Browser, serve: Callable[..., Child]) -> None:
    show(page, serve().url)
    shown = [e.text for e in page.find_all(".empty") if e.is_displayed()]
    assert len(shown) == 5
    assert any("Point a client at this address" in text for text in shown)
    assert page.errors() == []


# --- what changes ---------------------------------------------------------------------------------


def test_an_instance_drained_elsewhere_shows_within_two_seconds(
    page: Browser, fleet: Child
) -> None:
    show(page, fleet.url)
    assert state_of(page, "engine-b") == "up"
    for path, state in (("drain", "draining"), ("undrain", "up")):
        httpx.post(f"{fleet.url}/admin/instances/engine-b/{path}", trust_env=False)
        until(functools.partial(is_in, page, "engine-b", state), 2.0)
    assert "engine-b is up" in page.text("#announcer")


def test_draining_by_keyboard_alone(page: Browser, fleet: Child) -> None:
    show(page, fleet.url)
    keyboard = ActionChains(page.driver)

    def press(*keys: str) -> None:
        keyboard.send_keys(*keys).perform()

    def focused() -> str:
        return str(page.run("return document.activeElement.textContent"))

    for verb, state in (("Drain", "draining"), ("Undrain", "up")):
        for _ in range(40):
            press(Keys.TAB)
            if focused() == f"{verb} engine-a":
                break
        assert focused() == f"{verb} engine-a"
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
        press(Keys.ENTER)
        assert page.run("return document.querySelector('#drain-dialog').matches(':modal')")
        press(Keys.ESCAPE)
        assert not page.run("return document.querySelector('#drain-dialog').open")
        assert focused() == f"{verb} engine-a", "the focus comes back"
        assert state_of(page, "engine-a") != state
        press(Keys.ENTER)
        for _ in range(3):
            if focused() == verb:
                break
            press(Keys.TAB)
        assert focused() == verb
        press(Keys.ENTER)
        until(functools.partial(is_in, page, "engine-a", state), 2.0)
        assert not page.run("return document.querySelector('#drain-dialog').open")
    assert page.errors() == []


def test_when_the_gateway_is_gone_it_says_so_and_comes_back_by_itself(
    page: Browser, tmp_path: Path, serve: Callable[..., Child]
) -> None:
    gateway = serve()
    show(page, gateway.url)
    gateway.stop()
    until(lambda: page.text("#connection-text") == "no connection")
    assert "The gateway does not answer" in page.text("#banner")
    assert page.find("#banner").is_displayed()
    port = gateway.url.rpartition(":")[2]
    config = next(gateway.log.parent.glob("gateway*.yaml"))
    command = [*MOONGATE, "serve", "-c", str(config), "--port", port]
    again = Child.start(command, gateway.url, tmp_path / "again.log")
    try:
        until(lambda: page.text("#connection-text") == "live", 20.0)
        until(lambda: not page.find("#banner").is_displayed())
    finally:
        again.stop()


# --- the key --------------------------------------------------------------------------------------


def test_with_an_admin_key_the_wrong_one_is_refused_and_the_right_one_works(
    page: Browser, serve: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DASHBOARD_KEY", KEY)
    gateway = serve(auth={"admin_key_env": "DASHBOARD_KEY"})
    page.open(f"{gateway.url}/ui")
    until(lambda: page.find("#key-dialog").is_displayed())
    assert page.text("#fleet") == ""
    page.find("#key-input").send_keys("wrong", Keys.ENTER)
    until(lambda: page.text("#key-error") == "That is not the key.")
    page.find("#key-input").send_keys(KEY, Keys.ENTER)
    until(lambda: state_of(page, "a") == "up")
    assert not page.find("#key-dialog").is_displayed()
    page.find('#fleet [data-key="a"] button').click()
    page.find("#drain-confirm").click()
    until(lambda: state_of(page, "a") == "draining", 2.0)

    show(page, gateway.url)  # the tab still has it
    kept = page.run("return [localStorage.length, document.cookie]")
    assert kept == [0, ""]
    assert not any(KEY in url for url in page.requested())
    page.find("#key-button").click()
    until(lambda: page.find("#key-dialog").is_displayed())


# --- for everybody --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [PHONE, NARROW, (768, 1024)])
def test_on_a_phone_nothing_is_wider_than_the_screen(
    page: Browser, fleet: Child, size: tuple[int, int]
) -> None:
    page.set_size(*size)
    show(page, fleet.url)
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")
    until(lambda: page.find_all("#slowest td"))
    assert page.run("return document.documentElement.scrollWidth") <= size[0]
    cut = page.run(
        "return [...document.querySelectorAll('button, h1, h2, h3, .pill, dd, .lane-name')].filter("
        "e => e.offsetParent && !e.matches('.unseen') && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display"
        " !== 'inline').map(e => e.textContent)"
    )
    assert cut == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_axe_finds_nothing_wrong(
    page: Browser, fleet: Child, scheme: str, size: tuple[int, int]
) -> None:
    page.set_size(*size)
    page.prefer(prefers_color_scheme=scheme)
    show(page, fleet.url)
    page.run("for (const d of document.querySelectorAll('details')) d.open = true")
    assert problems(page) == []
    page.find("#fleet button").click()
    assert problems(page) == []
    page.find("#drain-cancel").click()


def problems(page: Browser) -> list[str]:
    found: Any = Axe().run(page.driver)
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:150]} {node['failureSummary'][:300]}"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


def test_who_asks_for_less_motion_gets_less(page: Browser, fleet: Child) -> None:
    transition = "return getComputedStyle(document.querySelector('.held')).transitionDuration"
    show(page, fleet.url)
    until(lambda: page.find_all(".held"))
    assert page.run(transition) == "0.4s"
    page.prefer(prefers_reduced_motion="reduce")
    assert page.run(transition) == "0s"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Return a function that starts a gateway before one simulated engine; both end with the test."""
    started: list[Child] = []

    def start(model: str = "sim", **settings: Any) -> Child:
        port = free_port()
        command = [*MOONGATE, "sim-engine", "--port", str(port), "--model", model]
        engine = Child.start(command, f"http://127.0.0.1:{port}", tmp_path / "engine.log")
        started.append(engine)
        engine.wait_until("/health", 20.0)
        given: dict[str, Any] = {"drain": {"limit_s": 1.0}, **settings}
        gateway = start_gateway(tmp_path, {"instances": [{"id": "a", "url": engine.url}], **given})
        started.append(gateway)
        return gateway

    yield start
    for child in reversed(started):
        child.stop()
