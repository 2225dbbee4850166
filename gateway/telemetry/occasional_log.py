"""A log for what may happen a thousand times a second, and is told once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable

INTERVAL_S = 60.0


class OccasionalLog:
    """Warns at most once in `INTERVAL_S`; what comes in between is left out. `clock`: monotonic."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._logged_at: float | None = None

    def warn(self, message: str) -> None:
        now = self._clock()
        if self._logged_at is None or now - self._logged_at >= INTERVAL_S:
            self._logged_at = now
            self._logger.warning("%s", message)
