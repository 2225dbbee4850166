#!/usr/bin/env python3
"""A container's health check: exit code 0 when the address answers.

`healthcheck http://HOST:PORT/PATH` wants a status of 200, `healthcheck tcp://HOST:PORT` a connection.
Standard library only, since it runs in every image, also in those without the gateway's dependencies.
"""

from __future__ import annotations

import socket
import sys
import urllib.request
from urllib.parse import urlsplit

TIMEOUT_S = 2.5
"""Below the time that containers give a check (3 s), so that the reason is told."""


def problem_at(address: str) -> str | None:
    """Return why `address` is not well, None if it is."""
    parts = urlsplit(address)
    try:
        if parts.scheme == "tcp":
            socket.create_connection((parts.hostname or "", parts.port or 0), TIMEOUT_S).close()
            return None
        # A proxy of the environment is never meant for the container's own address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(address, timeout=TIMEOUT_S) as answer:
            return None if answer.status == 200 else f"status {answer.status}"
    except (OSError, ValueError) as error:
        return str(error)


def main() -> int:
    """Return the exit code: 0 well, 1 not, 2 used wrongly."""
    if len(sys.argv) != 2:
        print("usage: healthcheck http://HOST:PORT/PATH | tcp://HOST:PORT", file=sys.stderr)
        return 2
    problem = problem_at(sys.argv[1])
    if problem is not None:
        print(f"{sys.argv[1]}: {problem}", file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
