"""What an engine announces, and that it is announced for as long as it lives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from launches import LAUNCH, NIXL, POOL, PREFILL

from moongate.engine_plugins.launch_command import LaunchError
from moongate.engine_plugins.registrar import (
    Announcement,
    Announcer,
    SendError,
    check_announcement,
    default_id,
    http_url,
    make_record,
    send_http,
)

# --- records --------------------------------------------------------------------------------------


def test_the_record_of_an_engine_by_itself() -> None:
    assert make_record(LAUNCH) == {
        "url": "http://127.0.0.1:8101",
        "role": "both",
        "kv_events": "tcp://127.0.0.1:5601",
        "kv_replay": "tcp://127.0.0.1:6601",
        "ranks": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "hash_algorithm": "sha256",
        "hash_seed": "0",
        "weight": 1.0,
        "pool": False,
    }


def test_the_record_of_a_prefill_engine_in_a_pool() -> None:
    launch = replace(
        LAUNCH,
        host="0.0.0.0",
        advertise_host="10.0.0.7",
        role="prefill",
        handoff=PREFILL,
        pool=replace(POOL, cache_prefix="blue"),
        block_size_tokens=32,
        data_parallel=2,
        tensor_parallel=4,
        extra_args=("--seed", "1", "--prefix_caching-hash-algo", "sha256_cbor"),
    )
    assert make_record(launch, weight=2.5) == {
        "url": "http://10.0.0.7:8101",
        "role": "prefill",
        "kv_events": "tcp://10.0.0.7:5601",
        "kv_replay": "tcp://10.0.0.7:6601",
        "kv_connector": "mooncake",
        "bootstrap_url": "http://10.0.0.7:8998",
        "block_size": 32,
        "ranks": 2,
        "tensor_parallel": 4,
        "pipeline_parallel": 1,
        "hash_algorithm": "sha256_cbor",
        "hash_seed": "0",
        "weight": 2.5,
        "pool": True,
        "pool_master": "10.0.0.1:50051",
        "pool_prefix": "blue",
    }


def test_nixl_has_no_bootstrap_address() -> None:
    record = make_record(replace(LAUNCH, role="decode", handoff=NIXL))
    assert record["kv_connector"] == "nixl"
    assert "bootstrap_url" not in record


def test_an_ipv6_address_stands_in_brackets() -> None:
    record = make_record(replace(LAUNCH, advertise_host="fd00::7"))
    assert record["url"] == "http://[fd00::7]:8101"
    assert record["kv_events"] == "tcp://[fd00::7]:5601"


def test_the_algorithm_may_be_given_in_one_word() -> None:
    extra = ("--prefix-caching-hash-algo=xxhash",)
    assert make_record(replace(LAUNCH, extra_args=extra))["hash_algorithm"] == "xxhash"


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_engine_on_all_addresses_must_say_at_which_it_is_reached(host: str) -> None:
    with pytest.raises(LaunchError, match=r"^advertise_host: an engine that listens on "):
        make_record(replace(LAUNCH, host=host))


def test_the_default_id_is_the_address_in_characters_that_ids_may_have() -> None:
    assert default_id(replace(LAUNCH, advertise_host="fd00::7")) == "fd00--7-8101"


ANNOUNCEMENT = Announcement(
    gateways=("http://gateway:8000",),
    instance_id="a",
    record={"url": "http://engine:1"},
    health_url="http://engine:1/health",
)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"instance_id": "a b"},
            "announce_id: 'a b'; choose 1 to 64 letters, digits, dots, dashes and underscores",
        ),
        ({"lease_s": 0.0}, "lease_s: 0.0 is too short; choose seconds, such as 30"),
        (
            {"gateways": ("gateway:8000",)},
            "announce: 'gateway:8000' is no http address of a gateway",
        ),
        ({"gateways": ("http://",)}, "announce: 'http://' is no http address of a gateway"),
        ({"gateways": ("http://[::",)}, "announce: 'http://[::' is no http address of a gateway"),
    ],
)
def test_announcements_that_can_not_be_are_refused(
    change: dict[str, object], complaint: str
) -> None:
    check_announcement(ANNOUNCEMENT)
    with pytest.raises(LaunchError) as caught:
        check_announcement(replace(ANNOUNCEMENT, **change))  # type: ignore[arg-type]
    assert str(caught.value) == complaint


# --- announcing -----------------------------------------------------------------------------------

Request = tuple[str, str]


@dataclass
class World:
    """An engine and its gateways, as far as `send` goes: what was asked, and what fails."""

    asked: list[Request] = field(default_factory=list)
    failing: dict[Request, str] = field(default_factory=dict)
    bodies: list[object] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str]) -> None:
        with self.changed:
            self.asked.append((method, url))
            if body is not None:
                self.bodies.append(json.loads(body))
                self.headers.append(headers)
            self.changed.notify_all()
            if (method, url) in self.failing:
                raise SendError(self.failing[method, url])

    def wait_for(self, request: Request, times: int = 1) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.asked.count(request) >= times, 5.0), (
                self.asked
            )


HEALTH = ("GET", "http://engine:1/health")
PUT = ("PUT", "http://gateway:8000/admin/instances/a")
DELETE = ("DELETE", "http://gateway:8000/admin/instances/a?withdrawn=true")


def announce(world: World, **change: object) -> Announcer:
    announcement = replace(ANNOUNCEMENT, **{"lease_s": 0.03, **change})  # type: ignore[arg-type]
    announcer = Announcer(announcement, world.send)
    announcer.start()
    return announcer


def test_an_engine_is_announced_renewed_and_taken_back() -> None:
    world = World()
    announcer = announce(world, admin_key="secret")
    world.wait_for(PUT, times=3)
    announcer.withdraw()
    announcer.withdraw()
    assert world.asked[:4] == [HEALTH, PUT, HEALTH, PUT]
    assert world.asked[-1] == DELETE
    assert world.asked.count(DELETE) == 1
    assert world.bodies[0] == {"url": "http://engine:1", "lease_s": 0.03}
    assert world.headers[0]["authorization"] == "Bearer secret"


def test_without_a_key_none_is_sent() -> None:
    world = World()
    announcer = announce(world)
    world.wait_for(PUT)
    announcer.withdraw()
    assert world.headers[0] == {"content-type": "application/json"}


def test_an_engine_that_does_not_answer_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    world = World(failing={HEALTH: "connection refused"})
    announcer = announce(world)
    world.wait_for(HEALTH, times=3)
    announcer.withdraw()
    assert {method for method, _ in world.asked} == {"GET"}
    assert caplog.messages == [
        "not announced to http://gateway:8000: the engine doesn't answer: connection refused"
    ]


def test_a_gateway_that_was_away_hears_of_it_again() -> None:
    world = World(failing={PUT: "connection refused"})
    announcer = announce(world)
    world.wait_for(PUT, times=2)
    with world.changed:
        world.failing.clear()
        tried = world.asked.count(PUT)
    world.wait_for(PUT, times=tried + 1)
    announcer.withdraw()
    assert world.asked[-1] == DELETE


def test_each_gateway_is_told_also_while_another_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moongate.engine_plugins.registrar")
    other = ("PUT", "http://other:8000/admin/instances/a")
    world = World(failing={PUT: "answered 403: no key", DELETE: "gone"})
    announcer = announce(world, gateways=("http://gateway:8000", "http://other:8000/"))
    world.wait_for(PUT, times=2)
    world.wait_for(other, times=2)
    announcer.withdraw()
    assert ("DELETE", f"{other[1]}?withdrawn=true") in world.asked
    assert DELETE not in world.asked
    assert sorted(caplog.messages) == [
        "announced to http://other:8000 as a",
        "not announced to http://gateway:8000: answered 403: no key",
    ]


def test_a_gateway_that_can_not_be_told_of_the_end_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(failing={DELETE: "connection refused"})
    announcer = announce(world)
    world.wait_for(PUT)
    announcer.withdraw()
    assert caplog.messages == [
        "http://gateway:8000 was not told of the end: connection refused",
    ]


# --- requests -------------------------------------------------------------------------------------


@pytest.fixture
def gateway() -> Iterator[Callable[..., str]]:
    """Return a function that starts an HTTP server with one answer to everything."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes = b"") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                length = int(self.headers["content-length"])
                received.append((self.path, dict(self.headers), self.rfile.read(length)))
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return http_url("127.0.0.1", server.server_port)

    received: list[tuple[str, dict[str, str], bytes]] = []
    start.received = received  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_request_is_sent_as_it_is(
    gateway: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    send_http("PUT", gateway(201) + "/admin", b"{}", {"authorization": "Bearer x"})
    ((path, headers, body),) = gateway.received  # type: ignore[attr-defined]
    assert (path, headers["Authorization"], body) == ("/admin", "Bearer x", b"{}")


def test_a_refusal_is_told_with_its_reason(gateway: Callable[..., str]) -> None:
    with pytest.raises(SendError, match=r"^answered 403: no key$"):
        send_http("PUT", gateway(403, b"no key\n"), b"{}", {})


def test_nobody_there_is_told_as_such() -> None:
    began = time.monotonic()
    with pytest.raises(SendError, match="refused"):
        send_http("PUT", "http://127.0.0.1:9/", b"{}", {})
    assert time.monotonic() - began < 3.0
