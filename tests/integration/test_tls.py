"""TLS on both sides: with the right certificates as without, with wrong ones a failure that says why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import HOST, Files, behind_tls, make_files
from fake_engine import FakeEngine, Received, stream_event
from live_gateway import LiveGateway, live_gateway, until
from pd_fleet import pd_fleet
from processes import MOONGATE, Child, free_port

from moongate import cli
from moongate.gateway.app import Gateway
from moongate.gateway.config.settings import Settings
from moongate.gateway.server import GatewayServer, listen

pytestmark = [
    pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"]),
    pytest.mark.timeout(30),
]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return make_files(tmp_path / "one")


@pytest.fixture
def others(tmp_path: Path) -> Files:
    return make_files(tmp_path / "other")


def at(port: int, **tls: Any) -> list[dict[str, Any]]:
    return [{"id": "a", "url": f"https://{HOST}:{port}", "tls": tls}]


# --- towards engines ------------------------------------------------------------------------------


async def test_an_engine_behind_tls_is_served_as_any_other(files: Files) -> None:
    async def stream(request: Received) -> None:
        await request.start_stream()
        for _ in range(3):
            await request.send_chunk(stream_event("x" * 10_000))
        await request.send_chunk(b"data: [DONE]\n\n")
        await request.send_chunk(b"")

    async with FakeEngine() as engine, behind_tls(engine.port, files) as port:
        async with live_gateway([], instances=at(port, ca=files.ca)) as gateway:
            answer = await gateway.chat(content="x" * 300_000)
            assert answer.status_code == 200
            engine.handler = stream
            streamed = await gateway.chat(stream=True)
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert len(streamed.text) > 30_000


async def test_a_client_that_leaves_is_noticed_behind_tls(files: Files) -> None:
    async def hang(request: Received) -> None:
        await request.client_left.wait()

    async with FakeEngine(hang) as engine, behind_tls(engine.port, files) as port:
        async with live_gateway([], instances=at(port, ca=files.ca)) as gateway:
            with pytest.raises(httpx.ReadTimeout):
                await gateway.client.post(
                    "/v1/chat/completions",
                    json={"model": "m", "messages": [{"role": "user", "content": "x"}]},
                    timeout=0.5,
                )
            await until(engine.received[0].client_left.is_set)
            await until(lambda: gateway.inflight() == 0)


async def test_an_engine_that_asks_for_a_certificate_gets_ours(files: Files, others: Files) -> None:
    async with FakeEngine() as engine:
        async with behind_tls(engine.port, files, client_ca=others.ca) as port:
            ours = {"ca": files.ca, "cert": others.cert, "key": others.key}
            async with live_gateway([], instances=at(port, **ours)) as gateway:
                assert (await gateway.chat()).status_code == 200
            async with live_gateway(
                [], instances=at(port, ca=files.ca), wait_ready=False
            ) as gateway:
                await down(gateway)
                assert (await gateway.chat()).status_code == 503


async def down(gateway: LiveGateway) -> None:
    await until(lambda: all(i.was_probed and not i.is_healthy for i in gateway.core.fleet))


async def test_an_engine_that_is_not_trusted_is_down_and_the_log_says_why(
    files: Files, others: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeEngine() as engine, behind_tls(engine.port, files) as port:
        for tls in ({"ca": others.ca}, {}):
            caplog.clear()
            async with live_gateway([], instances=at(port, **tls), wait_ready=False) as gateway:
                await down(gateway)
                began = time.monotonic()
                answer = await gateway.chat()
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_instance")
                assert time.monotonic() - began < 2.0
            (told,) = [r.getMessage() for r in caplog.records if "is not well" in r.getMessage()]
            assert "certificate verify failed" in told
            assert f"https://{HOST}:{port}/health" in told
    assert engine.received == []


@pytest.mark.parametrize("behaviour", ["not_trusted", "plain", "silent"])
async def test_a_handshake_that_fails_is_a_connection_that_fails(
    files: Files, others: Files, behaviour: str
) -> None:
    """Once it was well: the certificate is exchanged, TLS turned off, or nothing is said any more."""
    limits = {"connect_timeout_s": 0.5}
    async with FakeEngine() as engine, contextlib.AsyncExitStack() as fronts:
        front = await fronts.enter_async_context(behind_tls(engine.port, files))
        instances = at(front, ca=files.ca)
        slow = {"interval_s": 60.0}  # so that it counts as well
        async with live_gateway([], instances=instances, limits=limits, health=slow) as gateway:
            await fronts.aclose()
            if behaviour == "not_trusted":
                async with _moved(engine.port, others, front):
                    answer = await gateway.chat()
            else:
                async with _listener(front, answers=behaviour == "plain"):
                    answer = await gateway.chat()
    code = "engine_timeout" if behaviour == "silent" else "engine_unreachable"
    assert answer.json()["error"]["code"] == code
    assert str(front) not in answer.text
    assert engine.received == []


@contextlib.asynccontextmanager
async def _moved(inner: int, files: Files, port: int) -> AsyncIterator[None]:
    """Show another certificate at this port."""
    async with behind_tls(inner, files) as elsewhere:
        async with _listener(port, forwards_to=elsewhere):
            yield


@contextlib.asynccontextmanager
async def _listener(
    port: int, *, answers: bool = False, forwards_to: int | None = None
) -> AsyncIterator[None]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            if answers:
                writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            if forwards_to is None:
                await reader.read()
                return
            inner_reader, inner_writer = await asyncio.open_connection(HOST, forwards_to)
            inner_writer.write(await reader.read(65_536))
            writer.write(await inner_reader.read(65_536))
            inner_writer.write(await reader.read(65_536))
            inner_writer.transport.abort()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, HOST, port, reuse_address=True)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the listener ---------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def tls_gateway(engine: FakeEngine, **tls: Any) -> AsyncIterator[GatewayServer]:
    settings = Settings.model_validate(
        {
            "listen": {"tls": tls},
            "health": {"interval_s": 0.2},
            "drain": {"limit_s": 1.0},
            "instances": [{"id": "a", "url": engine.url}],
        }
    )
    server = GatewayServer(Gateway(settings), listen(HOST, 0))
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.has_started)
        core = server.gateway.core
        await until(lambda: all(i.is_healthy and i.facts is not None for i in core.fleet))
        yield server
    finally:
        server.request_stop()
        await serving


def client_of(server: GatewayServer, context: ssl.SSLContext) -> httpx.AsyncClient:
    url = f"https://{HOST}:{server.port}"
    return httpx.AsyncClient(base_url=url, verify=context, trust_env=False, timeout=10.0)


async def test_clients_are_served_over_tls(files: Files, others: Files) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 300_000}]}
    async with FakeEngine() as engine:
        async with tls_gateway(engine, cert=files.cert, key=files.key) as server:
            async with client_of(server, files.trusting()) as client:
                for _ in range(2):  # on one connection
                    answer = await client.post("/v1/chat/completions", json=body)
                    assert answer.status_code == 200
                assert (await client.get("/v1/models")).json()["data"][0]["id"] == "m"
                assert (await client.get("/admin/instances")).status_code == 200
            async with client_of(server, others.trusting()) as client:
                with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                    await client.get("/health")
            async with httpx.AsyncClient(trust_env=False) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get(f"http://{HOST}:{server.port}/health")
            old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            old.load_verify_locations(files.ca)
            with pytest.warns(DeprecationWarning, match="TLSv1_1"):
                old.maximum_version = ssl.TLSVersion.TLSv1_1
            async with client_of(server, old) as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/health")


async def test_only_clients_with_a_certificate_of_theirs_are_served(
    files: Files, others: Files
) -> None:
    async with FakeEngine() as engine:
        pair = {"cert": files.cert, "key": files.key}
        async with tls_gateway(engine, **pair, client_ca=others.ca) as server:
            context = files.trusting()
            context.load_cert_chain(others.cert, others.key)
            async with client_of(server, context) as client:
                assert (await client.get("/health")).status_code == 200
            for wrong in (files.trusting(), files.trusting(shows_own=True)):
                async with client_of(server, wrong) as client:
                    with pytest.raises(httpx.TransportError):
                        await client.get("/health")


async def test_who_connects_and_says_nothing_holds_nobody_up(files: Files) -> None:
    async with FakeEngine() as engine:
        async with tls_gateway(engine, cert=files.cert, key=files.key) as server:
            with socket.create_connection((HOST, server.port)):
                async with client_of(server, files.trusting()) as client:
                    assert (await client.get("/health")).status_code == 200


async def test_explain_trusts_what_it_is_told_to(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "request.json"
    request.write_text(json.dumps({"model": "m", "prompt": "x"}))
    async with FakeEngine() as engine:
        async with tls_gateway(engine, cert=files.cert, key=files.key) as server:
            url = f"https://{HOST}:{server.port}"
            arguments = ["explain", "-f", str(request), "--url", url]
            trusting = [*arguments, "--ca", files.ca]
            assert await asyncio.to_thread(cli.main, trusting) == 0
            assert json.loads(capsys.readouterr().out)["instance"] == "a"
            assert await asyncio.to_thread(cli.main, arguments) == 1
            assert "certificate verify failed" in capsys.readouterr().err
    assert cli.main([*arguments, "--ca", "/no/such"]) == 1
    assert "--ca /no/such: No such file" in capsys.readouterr().err


@pytest.mark.timeout(90)
async def test_a_load_test_trusts_what_it_is_told_to(files: Files, tmp_path: Path) -> None:
    words = [
        *("loadtest", "--preset", "agents", "--users", "2", "--duration", "2s", "--think", "0.1"),
        *(
            "--system-tokens",
            "300",
            "--first-tokens",
            "100",
            "--turn-tokens",
            "100",
            "--turns",
            "3",
        ),
        *("--answer-tokens", "4", "--out", str(tmp_path / "out")),
    ]

    async def run(*more: str) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *MOONGATE,
            *words,
            *more,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        return process.returncode, told.decode()

    async with pd_fleet(prefill=0, decode=0, both=1) as fleet:
        async with behind_tls(fleet.gateway.port, files) as port:
            url = ("--url", f"https://{HOST}:{port}")
            code, told = await run(*url, "--ca", files.ca)
            assert code == 0, told
            report = json.loads((tmp_path / "out" / "report.json").read_text())
            assert (report["failures"], report["requests"] > 0) == (0, True)
            code, told = await run(*url)
            assert (code, "certificate verify failed" in told) == (1, True), told
            code, told = await run(*url, "--ca", "/no/such")
            assert (code, "--ca /no/such: No such file" in told) == (1, True), told


# --- by the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--workers", "2"]])
async def test_what_serves_speaks_tls_as_the_file_says(
    files: Files, tmp_path: Path, more: list[str]
) -> None:
    port, config = free_port(), tmp_path / "gateway.yaml"
    tls = {"cert": files.cert, "key": files.key, "client_ca": files.ca}
    config.write_text(json.dumps({"instances": [], "listen": {"tls": tls}}))
    argv = [*MOONGATE, "serve", "-c", str(config), "--port", str(port), *more]
    child = Child.start(argv, f"https://{HOST}:{port}", tmp_path / "gateway.log")
    try:

        async def answers() -> bool:
            context = files.trusting(shows_own=True)
            async with httpx.AsyncClient(verify=context, trust_env=False) as client:
                with contextlib.suppress(httpx.HTTPError):
                    return (await client.get(f"{child.url}/health")).status_code == 200
            return False

        await until(answers, 20.0)
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"http://{HOST}:{port}/health")
        async with httpx.AsyncClient(verify=files.trusting(), trust_env=False) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"{child.url}/health")
        assert "listens on https://" in child.log.read_text()
    finally:
        assert await asyncio.to_thread(child.stop) == 0, child.tail()
