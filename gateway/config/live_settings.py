"""The settings in force, for whoever reads them when they are needed.

A part that works with a setting as it is when it is used takes this in place of the settings, and follows
a reload without being told. What a part makes of the settings when it is made, it renews when it is told
to (`reload.py`). Only the reload writes here.
"""

from __future__ import annotations

from moongate.gateway.config.settings import Settings


class LiveSettings:
    """`current` is replaced as a whole, so whoever reads it twice for one purpose keeps it meanwhile."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings
