"""A real Mooncake pool for the tests: a master, and a store process in which blocks outlive engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
from processes import ENGINE_PYTHON, Child, EngineProcess, free_port

from moongate.engine_plugins.kv_transfer_launch import PoolMember
from moongate.engine_plugins.store_launch import (
    MasterLaunch,
    StoreLaunch,
    build_master_command,
    build_store_command,
)

MIB = 1024 * 1024
BIN = ENGINE_PYTHON.parent


@dataclass(slots=True)
class MooncakePool:
    """A master and a store process, running inside `with`. `disk`: an existing folder of the store's.

    The master can be killed and started again on its addresses.
    """

    directory: Path
    segment_bytes: int = 1024 * MIB
    disk: Path | None = None
    port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    master: Child | None = None
    store: Child | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the gateway's section `pool`."""
        return {"kind": "mooncake", "master": self.address, "admin_url": self.url}

    def start(self) -> None:
        self.start_master()
        self.start_store()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_master(self) -> None:
        program = str(BIN / "mooncake_master")
        has_disks = self.disk is not None
        command = build_master_command(
            MasterLaunch(program, self.port, self.http_port, has_disks=has_disks)
        )
        argv = (*command.argv, "--metrics_host=127.0.0.1", "--rpc_address=127.0.0.1")
        self.master = Child.start(argv, self.url, self.directory / "master.log")
        self.master.wait_until("/health", 20.0)

    def start_store(self) -> None:
        launch = StoreLaunch(
            program=str(BIN / "mooncake_client"),
            host="127.0.0.1",
            master=self.address,
            segment_bytes=self.segment_bytes,
            port=free_port(),
            disk_folder=str(self.disk) if self.disk is not None else None,
            disk_bytes=512 * MIB if self.disk is not None else None,
            disk_buffer_bytes=64 * MIB,
        )
        command = build_store_command(launch)
        log = self.directory / "store.log"
        self.store = Child.start(command.argv, self.url, log, command.environment)

    def member(self, name: str) -> PoolMember:
        """Return the membership of an engine of this name."""
        return PoolMember(
            master=self.address,
            config_file=str(self.directory / f"mooncake-{name}.json"),
            mode="standalone-store",
            buffer_bytes=128 * MIB,
            store_offloads=self.disk is not None,
        )

    def engine(self, model: Path, name: str, **options: Any) -> EngineProcess:
        return EngineProcess.make(model, self.directory, name, pool=self.member(name), **options)

    def evicted_keys(self) -> int:
        """Return how many keys the master has evicted since its start."""
        page = httpx.get(f"{self.url}/metrics", trust_env=False).text
        lines = (line for line in page.splitlines() if line.startswith("master_evicted_key_count "))
        return int(float(next(lines).split()[1]))

    def stop(self) -> None:
        for child in (self.store, self.master):
            if child is not None:
                child.kill()
