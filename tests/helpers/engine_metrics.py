"""What a real engine counts."""

from __future__ import annotations

import httpx


def counter(url: str, name: str, **labels: str) -> float:
    """Return the sum of a counter's (or gauge's) samples that have these labels, 0 without any."""
    page = httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).text
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(part in line for part in wanted)
    )
