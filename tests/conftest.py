"""Which event loops the tests run on: asyncio's, and, where a test's mark asks for it, the server's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.hookimpl
def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Return the loops that `pytest.mark.asyncio(loop_factories=[...])` can name."""
    mark = item.get_closest_marker("asyncio")
    is_asked = mark is not None and "loop_factories" in mark.kwargs
    return LOOPS if is_asked else {"asyncio": asyncio.new_event_loop}
