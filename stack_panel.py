"""The panel of `moongate up`: what the stack does now, drawn over and over in the same place of a terminal.

Made of the very parts that the dashboard shows (`gateway/admin/live_view.py`). Texts of clients are shown without what a
terminal would take for a command. Only for terminals; elsewhere `moongate up` prints lines and is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

REDRAW_S = 0.5
STATE_STYLES: Mapping[str, str] = {"up": "green", "draining": "yellow", "suspended": "yellow"}
OTHER_STATE_STYLE = "red"
NAME_CHARS_MAX = 32
WIDTH_MAX = 110
MARGIN = 4
"""Columns that stay free at the right: a terminal writes ^C there, and would begin a new line for it."""

REASON_TEXTS: Mapping[str, str] = {
    "device_prefix": "holds the prefix",
    "pool_prefix": "gets the prefix from the pool",
    "session": "is the session's home",
    "load": "has the least work",
    "only_choice": "is the only choice",
    "fallback": "has the least work; the prompt could not be read",
}


def takes_panel(stream: TextIO) -> bool:
    """Tell whether a stream is a terminal on which something can be drawn in place."""
    return stream.isatty() and not Console(file=stream).is_dumb_terminal


@contextlib.contextmanager
def show_starting(names: Sequence[str]) -> Iterator[None]:
    """Show that engines are starting, and for how long, until the block ends."""
    began = time.monotonic()

    def told() -> Text:
        return Text(f"starting {', '.join(names)}: {time.monotonic() - began:.0f} s")

    live = Live(get_renderable=told, refresh_per_second=2, transient=True)
    live.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal may be gone
            live.stop()


async def show_panel(read_parts: Callable[[], Mapping[str, Any]]) -> None:
    """Draw the panel until cancelled, or until the terminal is gone.

    Lines that are logged meanwhile stand above it.
    """
    console = Console(file=sys.stdout)
    # Without a thread of its own: parts are read where the gateway runs, between its steps.
    live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(OSError), live, _logging_above():
        while True:
            width = min(WIDTH_MAX, console.width - MARGIN)
            live.update(make_panel(read_parts(), width), refresh=True)
            await asyncio.sleep(REDRAW_S)


@contextlib.contextmanager
def _logging_above() -> Iterator[None]:
    """Let handlers that log to this terminal write by way of the panel's `sys.stderr`."""
    terminal = sys.__stderr__
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
        and handler.stream is terminal
        and terminal.isatty()
    ]
    for handler in handlers:
        handler.setStream(sys.stderr)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(terminal)


# --- what it shows --------------------------------------------------------------------------------


def make_panel(parts: Mapping[str, Any], width: int) -> RenderableType:
    """Return the panel for these parts of the live view, so many columns wide."""
    is_stopping = parts["gateway"]["is_draining"]
    lines = (
        _engines(parts["instances"]["shown"]),
        Text(),
        _numbers(parts["totals"]),
        _last(parts["decisions"]["shown"]),
    )
    subtitle = "stopping; Ctrl-C again: at once" if is_stopping else "Ctrl-C stops all of it"
    return Panel(
        Group(*lines), title="moongate", subtitle=subtitle, title_align="left", width=width
    )


def _engines(instances: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, show_edge=False, expand=True)
    table.add_column("engine", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("requests", "queued prefill", "KV in use"):
        table.add_column(heading, justify="right", no_wrap=True)
    for instance in instances:
        caches = instance["caches"]
        held = sum(cache["tokens_held"]["device"] for cache in caches)
        capacity = (instance["capacity_tokens"] or 0) * len(caches)
        table.add_row(
            instance["id"],
            Text(instance["state"], STATE_STYLES.get(instance["state"], OTHER_STATE_STYLE)),
            str(sum(cache["active_requests"] for cache in caches)),
            f"{sum(cache['queued_prefill_tokens'] for cache in caches):,} tokens",
            f"{held:,} tokens" + (f" ({held / capacity:.0%})" if capacity else ""),
        )
    return table


def _numbers(totals: Mapping[str, Any]) -> Text:
    reused = totals["device_tokens"] + totals["pool_tokens"]
    prompt = reused + totals["recompute_tokens"]
    ttft_ms = totals["ttft_ms_p50"]
    told = [
        f"requests {totals['requests']:,} ({totals['active_requests']} under way)",
        f"reuse {reused / prompt:.0%} of {prompt:,} prompt tokens"
        if prompt
        else "reuse: no prompt yet",
        f"first token {ttft_ms:,.0f} ms" if ttft_ms is not None else "",
    ]
    return _line("   ".join(filter(None, told)))


def _last(decisions: Sequence[Mapping[str, Any]]) -> Text:
    if not decisions:
        return _line("No request yet: paste the curl line above into another terminal.", "bold")
    last = decisions[0]
    session, prompt = last["session"], last["prompt_tokens"]
    name = f"session {session['number']}" if session["key"] is None else session["key"]
    reused = last["device_tokens"] + last["pool_tokens"]
    how_much = f", reuses {reused:,} of {prompt:,} tokens" if prompt else ""
    reason = REASON_TEXTS.get(last["reason"], last["reason"])
    return _line(f"last: {_plain(name)} to {last['instance']}, which {reason}{how_much}")


def _line(text: str, style: str = "") -> Text:
    """Return a text that is cut where the panel ends: with lines that come and go it would jump."""
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _plain(text: str) -> str:
    """Return a client's text without what is not to be printed, cut."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return (
        shown
        if len(shown) <= NAME_CHARS_MAX
        else f"{shown[: NAME_CHARS_MAX - 1]}\N{HORIZONTAL ELLIPSIS}"
    )
