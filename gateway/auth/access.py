"""Who may ask, now: the tenants that are in force, and how much of their rates is left.

The tenants are replaced as a whole, by what `prepare` returns (for a reload) or because a key file has changed; requests under way
keep those that they began with. Counts of rates outlive that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Mapping

from moongate.gateway.auth.auth_settings import AuthSettings, KeyUnreadable
from moongate.gateway.auth.rates import LocalRates, Measure, RateCounters, Verdict
from moongate.gateway.auth.tenants import ANYBODY, Tenant, Tenants
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import RawHeaders, read_headers

logger = logging.getLogger(__name__)

FILES_INTERVAL_S = 1.0
"""How often key files are looked at; a `stat` each."""

BYTES_PER_TOKEN = 4
"""What a body counts as before its prompt is known."""

ESTIMATED_BYTES_MAX = 1 << 20
"""Larger bodies are mostly images."""

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Whoever watches the gateway has no client's key."""

PAGE = "/ui"
"""The dashboard's page holds no data; what it shows it asks of `/admin`."""


class Access:
    """Whose a request is. `start` it inside the event loop, and `close` it."""

    def __init__(
        self,
        settings: AuthSettings,
        clock: Callable[[], float],
        rates: RateCounters | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises: KeyUnreadable."""
        self._settings = settings
        self._clock = clock
        self._environment = environment
        self._stamps = _stamp_files(settings)  # before they are read, so that no change is missed
        self._watching: asyncio.Task[None] | None = None
        self.tenants = Tenants.from_settings(settings, environment)
        self.rates: RateCounters = rates if rates is not None else LocalRates()

    def start(self) -> None:
        self._watching = asyncio.create_task(self._keep_watching())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    # --- which tenants ----------------------------------------------------------------------------

    def prepare(self, settings: AuthSettings) -> Callable[[], None]:
        """Return what puts other keys in force, which can't fail. Raises: KeyUnreadable."""
        stamps = _stamp_files(settings)
        tenants = Tenants.from_settings(settings, self._environment)

        def put_in_force() -> None:
            self._settings, self.tenants, self._stamps = settings, tenants, stamps

        return put_in_force

    def refresh(self) -> bool:
        """Read the key files again if one has changed; return whether that was so.

        One that can't be read leaves everything as it was, until it changes again.
        """
        stamps = _stamp_files(self._settings)
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            self.tenants = Tenants.from_settings(self._settings, self._environment)
        except KeyUnreadable as error:
            logger.error("the keys stay as they were: %s", error)
            return False
        logger.info("keys were read again: there are %d", len(self.tenants))
        return True

    async def _keep_watching(self) -> None:
        while True:
            await asyncio.sleep(FILES_INTERVAL_S)
            self.refresh()

    # --- whose request ----------------------------------------------------------------------------

    def admit(self, headers: RawHeaders) -> Tenant:
        """Return whose a request is. Raises: GatewayError (401)."""
        return self.tenants.find(read_headers(headers)) if self.asks else ANYBODY

    @property
    def asks(self) -> bool:
        """Tell whether clients need keys."""
        return len(self.tenants) > 0

    def meter(self, tenant: Tenant) -> Meter | None:
        """Return what counts a request of this tenant. None: nothing limits it."""
        return None if tenant.limits.are_none else Meter(tenant, self.rates, self._clock)


def _stamp_files(settings: AuthSettings) -> dict[str, tuple[int, ...]]:
    """Return by what a change of each key file shows."""
    stamps: dict[str, tuple[int, ...]] = {}
    for path in [one.key_file for one in settings.keys if one.key_file is not None]:
        try:
            stat = os.stat(path)
        except OSError as error:
            stamps[path] = (error.errno or 0,)
        else:
            stamps[path] = stat.st_mtime_ns, stat.st_ino, stat.st_size
    return stamps


def is_open(path: str) -> bool:
    """Tell whether a path, as it was asked for, is answered without a client's key."""
    return path in OPEN_PATHS or path == PAGE or path.startswith(f"{PAGE}/")


_ADMITTED_BEFORE = Verdict({})
"""Of what is computed for a request that was let in, and answered, before."""


class Meter:
    """What one request takes of its tenant's rates.

    A guess when it begins, by the size of its body; the prompt's tokens once they are known; in the end what the
    engine reports. Each time the difference is counted.
    """

    def __init__(self, tenant: Tenant, rates: RateCounters, clock: Callable[[], float]) -> None:
        self._tenant = tenant
        self._rates = rates
        self._clock = clock
        self._counted = 0  # tokens
        self._verdict: Verdict | None = None
        self._is_over = False

    @property
    def counts_tokens(self) -> bool:
        return self._tenant.limits.tokens_per_minute is not None

    async def begin(self, body_bytes: int) -> None:
        """Count a request that begins. Raises: GatewayError (429)."""
        tokens = min(body_bytes, ESTIMATED_BYTES_MAX) // BYTES_PER_TOKEN
        tenant = self._tenant
        verdict = await self._rates.take(tenant.rate_name, tenant.limits, tokens, self._clock())
        self._verdict = verdict
        if verdict.lacking is not None:
            self._is_over = True
            raise _too_many(verdict, verdict.lacking)
        self._counted = tokens

    def note_prompt(self, tokens: int | None) -> None:
        """The prompt's tokens are known, or were not to be had."""
        if tokens is not None:
            self._settle(tokens)

    def ended(self, status: int, prompt_tokens: int | None, completion_tokens: int | None) -> None:
        """The answer is complete. What the engine refused has cost nothing."""
        if status == 200:
            self.end(prompt_tokens, completion_tokens or 0)
        else:
            self.give_back()

    def end(self, prompt_tokens: int | None, completion_tokens: int) -> None:
        """The answer is there, or as much of it as there will be. `prompt_tokens` None: not reported."""
        if not self._is_over:
            self._is_over = True
            known = prompt_tokens if prompt_tokens is not None else self._counted
            self._settle(known + completion_tokens)

    def give_back(self) -> None:
        """No engine has done anything: its tokens are not counted. As a request it is."""
        if not self._is_over:
            self._is_over = True
            self._settle(0)

    def headers(self) -> dict[str, str]:
        """Return what a client is told of its rates, as OpenAI names it."""
        if self._verdict is None:
            return {}
        told: dict[str, str] = {}
        for measure, room in self._verdict.rooms.items():
            name = "requests" if measure is Measure.REQUESTS else "tokens"
            told[f"x-ratelimit-limit-{name}"] = str(room.limit)
            told[f"x-ratelimit-remaining-{name}"] = str(room.remaining)
            told[f"x-ratelimit-reset-{name}"] = duration(room.reset_s)
        return told

    def _settle(self, tokens: int) -> None:
        tenant = self._tenant
        if self.counts_tokens and tokens != self._counted:
            more, verdict = tokens - self._counted, self._verdict or _ADMITTED_BEFORE
            self._rates.settle(tenant.rate_name, tenant.limits, more, self._clock(), verdict)
        self._counted = tokens


def _too_many(verdict: Verdict, lacking: Measure) -> GatewayError:
    limit = verdict.rooms[lacking].limit
    seconds = max(1, math.ceil(verdict.retry_after_s))
    return GatewayError(
        429,
        f"the rate limit is reached: {lacking.value} is {limit}; try again in {seconds} s",
        "rate_limit_exceeded",
        headers={"retry-after": str(seconds)},
        reason=lacking.value,
    )


def duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: 17ms, 2s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    whole = math.ceil(seconds)
    return f"{whole // 60}m{whole % 60}s" if whole >= 60 else f"{whole}s"
