"""What is asked of a server before and after a run: is it there, which model, what do its prompts cost
beside their words, and, if it is a moongate gateway, what does it count itself.

The edge towards the server, in the command's own process; locust has no part in it. What it sends before
a run is counted by the gateway before the run's first look at its metrics.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from moongate.loadtest.conversations import TOOLS
from moongate.loadtest.gateway_totals import GatewayTotals, read_totals
from moongate.loadtest.settings import DEFAULT_URL, ROUTE, server_root
from moongate.loadtest.words import SIMULATED_COSTS, TokenCosts, make_text

TIMEOUT_S = 120.0
"""For one small request to a server that may be busy or starting."""
PROBE_WORDS = 64
SETTLED_S_MAX = 10.0
"""A gateway may count an answer a moment after its client has it."""


class ProbeError(RuntimeError):
    """The server can't be loaded; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a server is like."""

    model: str
    costs: TokenCosts
    ignores_eos: bool
    has_receipts: bool
    notes: tuple[str, ...] = ()
    """What could not be found out, in words."""


def normalise_url(url: str) -> str:
    """Return a server's address without what clients add. Raises: ProbeError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ProbeError(f"--url {url}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ProbeError(f"--url {url}: an address such as {DEFAULT_URL} is wanted")
    return server_root(url)


class Prober:
    """Asks one server. Close it, or use it as a context."""

    def __init__(self, url: str, api_key: str | None = None, ca: Path | None = None) -> None:
        """`ca`: file with the roots that are trusted; None: the usual ones. Raises: ProbeError."""
        self._url = url
        try:
            trusted = ssl.create_default_context(cafile=ca) if ca is not None else True
        except (OSError, ssl.SSLError) as error:
            raise ProbeError(f"--ca {ca}: {error.strerror or error}") from error
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, headers=headers, verify=trusted
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def probe(self, model: str | None, *, has_tools: bool) -> Probe:
        """Return what the server is like. Raises: ProbeError."""
        notes: list[str] = []
        chosen = model or self._first_model(notes)
        ignores_eos = True
        answer = self._ask(chosen, [_user(0, PROBE_WORDS)], ignores_eos=True)
        if answer.status_code == httpx.codes.BAD_REQUEST:
            ignores_eos = False
            answer = self._ask(chosen, [_user(0, PROBE_WORDS)], ignores_eos=False)
        self._check(answer)
        if not ignores_eos:
            notes.append("the server refuses ignore_eos: answers may be shorter than asked for")
        one = _prompt_tokens(answer)
        costs = None if one is None else self._measure(chosen, one, ignores_eos, has_tools)
        if costs is None:
            notes.append("the server reports no prompt tokens: prompts' lengths are a guess")
        return Probe(
            model=chosen,
            costs=costs or SIMULATED_COSTS,
            ignores_eos=ignores_eos,
            has_receipts="x-moongate-instance" in answer.headers,
            notes=tuple(notes),
        )

    def totals(self) -> GatewayTotals | None:
        """Return what the gateway counts, None if it is no moongate gateway or doesn't say."""
        try:
            answer = self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        if answer.status_code != httpx.codes.OK or "moongate_requests" not in answer.text:
            return None
        return read_totals(answer.text)

    def settled_totals(self) -> GatewayTotals | None:
        """Return the totals once nothing more is added to them, as far as waiting helps."""
        deadline = time.monotonic() + SETTLED_S_MAX
        latest = self.totals()
        while latest is not None and time.monotonic() < deadline:
            time.sleep(0.25)
            earlier, latest = latest, self.totals()
            if latest == earlier:
                break
        return latest

    # --- asking ---

    def _first_model(self, notes: list[str]) -> str:
        answer = self._get_models()
        try:
            names = [entry["id"] for entry in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if not names:
            raise ProbeError(f"{self._url}/v1/models names no model; give one with --model")
        if len(names) > 1:
            notes.append(f"of {len(names)} models the first is asked: {names[0]}")
        return str(names[0])

    def _get_models(self) -> httpx.Response:
        answer = self._send("GET", "/v1/models")
        self._check(answer)
        return answer

    def _ask(
        self, model: str, messages: Sequence[Mapping[str, Any]], *, ignores_eos: bool, **more: Any
    ) -> httpx.Response:
        body = {"model": model, "messages": messages, "max_tokens": 1, "temperature": 0, **more}
        if ignores_eos:
            body["ignore_eos"] = True
        return self._send("POST", ROUTE, body)

    def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return self._client.request(method, path, json=body)
        except httpx.TimeoutException as error:
            raise ProbeError(f"{self._url} does not answer within {TIMEOUT_S:.0f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ProbeError(
                f"{self._url} can't be reached: {error}. `moongate up` starts a stack on this machine"
            ) from error

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code == httpx.codes.OK:
            return
        told = f"{answer.request.url} answered {answer.status_code}"
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise ProbeError(f"{told}: name the variable with the API key by --api-key-env")
        raise ProbeError(f"{told}: {answer.text[:300]}")

    def _measure(
        self, model: str, one: int, ignores_eos: bool, has_tools: bool
    ) -> TokenCosts | None:
        """Return what prompts take beside words. `one`: the prompt tokens of one message."""

        def tokens(messages: Sequence[Mapping[str, Any]], **more: Any) -> int | None:
            answer = self._ask(model, messages, ignores_eos=ignores_eos, **more)
            return _prompt_tokens(answer) if answer.status_code == httpx.codes.OK else None

        longer = tokens([_user(0, 3 * PROBE_WORDS)])
        three = tokens(
            [
                _user(0, PROBE_WORDS),
                _user(1, PROBE_WORDS) | {"role": "assistant"},
                _user(2, PROBE_WORDS),
            ]
        )
        tools = (
            tokens([_user(0, PROBE_WORDS)], tools=TOOLS, tool_choice="none") if has_tools else one
        )
        if longer is None or three is None:
            return None
        per_word = max((longer - one) / (2 * PROBE_WORDS), 0.1)
        pair = max(
            three - one - round(2 * PROBE_WORDS * per_word), 0
        )  # a question's and an answer's
        per_message = pair // 2
        return TokenCosts(
            per_word=round(per_word, 3),
            per_message=per_message,
            per_answer=pair - per_message,
            per_request=max(one - round(PROBE_WORDS * per_word) - per_message, 0),
            tools=max(tools - one, 0) if tools is not None else 0,
        )


def _user(number: int, words: int) -> dict[str, Any]:
    return {"role": "user", "content": make_text(f"probe/{number}", words)}


def _prompt_tokens(answer: httpx.Response) -> int | None:
    try:
        value = answer.json()["usage"]["prompt_tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, int) else None
