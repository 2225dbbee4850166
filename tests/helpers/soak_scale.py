"""How long the long forms are: `MOONGATE_SOAK_SCALE` is 1 for what the project promises, less for a try."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("MOONGATE_SOAK_SCALE", "1"))
