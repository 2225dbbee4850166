"""Taking in a changed configuration file while requests run, as a whole or not at all.

Theory of operation. The file is looked at about once a second, and whenever somebody asks (SIGHUP,
`POST /admin/reload`). What it says is read and checked; if a key differs that needs a restart, nothing
is done. Then all that can fail is made (`Preparation`: a policy, links to instances): nothing has changed
yet. Then, within one step of the event loop, the settings in force are replaced, what was prepared is put
in place, and the parts renew what they made of the settings; none of that can fail. No request sees half
of it, and none is touched: what it has begun with it ends with.

A file that can't be used is told once for each content, one that can't be read once for each reason; the next content
is tried when it is seen.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moongate.gateway.config.config_file import Content, Loaded
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.config.reloadable import Effect, describe_instances, find_changes
from moongate.gateway.config.settings import Settings
from moongate.gateway.config.settings_text import SettingsError

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.8
"""Between two looks at the file."""

STEADY_S = 0.1
"""A file that differs is looked at once more: one that is just being written is no file yet. Its beginning
could be one that leaves all instances out."""

Preparation = Callable[[Settings], Callable[[], None]]
"""Makes what can fail, and returns what puts it in place, which can't. Raises: ValueError."""


class Result(Enum):
    """How a reload ended, as the metric says it."""

    OK = "ok"
    FAILED = "failed"  # the file can't be used
    NEEDS_RESTART = "needs_restart"  # it can, but not by a process that runs


@dataclass(frozen=True, slots=True)
class Outcome:
    """`changed`: keys (never values), where it is OK; else `problems`, a line each."""

    result: Result
    changed: Sequence[str] = ()
    problems: Sequence[str] = ()


class Reloader:
    """Reloads one file. `start` it inside the event loop, and `close` it."""

    def __init__(
        self,
        loaded: Loaded,
        live: LiveSettings,
        preparations: Sequence[Preparation],
        renew: Callable[[Settings], None],
    ) -> None:
        """`loaded`: what is in force; `live` has its settings. `renew`: lets everybody make anew what they
        make of the settings; it can't fail."""
        self._file = loaded.file
        self._live = live
        self._preparations = preparations
        self._renew = renew
        self._seen = loaded.content.digest  # or, of a file that could not be read, why
        self._asking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._reloads: set[asyncio.Task[Outcome]] = set()
        self.digest = loaded.content.digest  # of the file in force
        self.problems: Sequence[str] = ()  # of the file as it is, if it is not in force
        self.counts = Counter(dict.fromkeys(Result, 0))

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_watching())

    async def close(self) -> None:
        tasks = [*self._reloads, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ask(self) -> None:
        """Reload soon, as SIGHUP asks."""
        logger.info("SIGHUP: reading %s again", self._file)
        task = asyncio.create_task(self.reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def reload(self) -> Outcome:
        """Read the file and let it hold, if it can. Variables and files that it names are read anew."""
        async with self._asking:
            try:
                content = await asyncio.to_thread(self._file.read)
            except SettingsError as error:
                return self._note(str(error), Outcome(Result.FAILED, problems=error.problems))
            return self._note(content.digest, await self._take_in(content))

    async def follow(self, digest: bytes) -> bytes:
        """Reload, if another worker has another file in force, and return which one is here then."""
        if self.digest.encode() != digest:
            await self.reload()
        return self.digest.encode()

    async def _keep_watching(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            try:
                await self._look()
            except Exception:
                # A bug of ours; a file that is never looked at again would be worse.
                logger.exception("%s could not be looked at", self._file)

    async def _look(self) -> None:
        """Reload if the file says something else than when it was last looked at."""
        found = await self._find()
        if found == self._seen:
            return
        await asyncio.sleep(STEADY_S)
        if await self._find() == found:
            await self.reload()

    async def _find(self) -> str:
        """Return the digest of what the file says now, or why it can't be read."""
        try:
            return (await asyncio.to_thread(self._file.read)).digest
        except SettingsError as error:
            return str(error)

    async def _take_in(self, content: Content) -> Outcome:
        """Let what the file says hold, or nothing of it."""
        try:
            settings = await asyncio.to_thread(self._file.settings, content)
        except SettingsError as error:
            return Outcome(Result.FAILED, problems=error.problems)
        before = self._live.current
        changes = find_changes(before, settings)
        fixed = [c for c in changes if c.effect is Effect.RESTART]
        if fixed:
            said = f"needs a restart; nothing of this file holds before, and {self.digest} stays"
            problems = [content.point_out(change.path, said) for change in fixed]
            return Outcome(Result.NEEDS_RESTART, problems=problems)
        # From here on nothing is waited for.
        try:
            swaps = [prepare(settings) for prepare in self._preparations]
        except ValueError as error:
            return Outcome(Result.FAILED, problems=[f"{content.file}: {error}"])
        self._live.current = settings
        for swap in swaps:
            swap()
        self._renew(settings)
        self.digest = content.digest
        shown = [change.shown for change in changes]
        return Outcome(Result.OK, [*shown, *describe_instances(before, settings)])

    def _note(self, seen: str, outcome: Outcome) -> Outcome:
        self.counts[outcome.result] += 1
        is_news = seen != self._seen or outcome.problems != self.problems
        self._seen, self.problems = seen, outcome.problems
        if outcome.result is Result.OK:
            told = ", ".join(outcome.changed) or "nothing has changed"
            logger.info("%s (%s) is in force: %s", self._file, self.digest, told)
        elif is_news:
            for problem in outcome.problems:
                logger.error("the configuration is not reloaded: %s", problem)
        return outcome


class ReloadMetrics(Collector):
    """What is told of reloads. Without a file nothing can be reloaded, and there are no reloads."""

    def __init__(self, reloader: Reloader) -> None:
        self._reloader = reloader

    def collect(self) -> Iterable[Metric]:
        reloader = self._reloader
        reloads = CounterMetricFamily(
            "moongate_config_reloads", "Reloads, by how they ended", labels=["result"]
        )
        for result, count in reloader.counts.items():
            reloads.add_metric([result.value], count)
        yield reloads
        yield GaugeMetricFamily(
            "moongate_config_reload_failed",
            "1 if the file as it is is not in force",
            float(bool(reloader.problems)),
        )
        yield GaugeMetricFamily(
            "moongate_config_hash",
            "Of the file in force, as a number: equal where it is the same",
            float(int(reloader.digest, 16)),
        )
