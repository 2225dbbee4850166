"""Containers of docker-compose.yml's services. `make images` must have built their images."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests here time for engines to start."""
    for item in items:
        if "images" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.timeout(400))
