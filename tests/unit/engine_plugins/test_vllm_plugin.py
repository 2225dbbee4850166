"""The plugin changes one answer, and only where there is no accelerator."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

from moongate.engine_plugins import vllm_plugin

ENGINE_SIDE = (
    *("moongate.engine_plugins.vllm_plugin", "moongate.engine_plugins.registrar"),
    *("moongate.engine_plugins.supervisor", "moongate.engine_cli"),
)


class StandInTorch(ModuleType):
    """PyTorch, as far as the plugin asks it."""

    def __init__(self, built_for: str | None) -> None:
        super().__init__("torch")
        self.accelerator = SimpleNamespace(
            current_accelerator=lambda: built_for, current_device_index=lambda: 3
        )


def test_without_an_accelerator_the_device_index_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = StandInTorch(built_for=None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    vllm_plugin.register()
    vllm_plugin.register()
    assert torch.accelerator.current_device_index() == 0


def test_with_an_accelerator_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = StandInTorch(built_for="cuda")
    before = torch.accelerator.current_device_index
    monkeypatch.setitem(sys.modules, "torch", torch)
    vllm_plugin.register()
    assert torch.accelerator.current_device_index is before


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    (plugin,) = entry_points(group="vllm.general_plugins", name="moongate")
    assert plugin.load() is vllm_plugin.register


def _loaded_by(*modules: str) -> set[str]:
    """Return the packages outside the standard library that a new Python has then loaded."""
    script = (
        f"import sys\n{''.join(f'import {module}; ' for module in modules)}\n"
        "names = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names\n"
        "print(*names)"
    )
    command = [sys.executable, "-c", script]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
    return set(shown.stdout.split())


def test_what_runs_beside_an_engine_needs_the_standard_library_only() -> None:
    # What an environment loads by itself at each start doesn't count.
    assert _loaded_by(*ENGINE_SIDE) - _loaded_by() == {"moongate"}
