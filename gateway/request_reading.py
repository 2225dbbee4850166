"""From a body and its headers to the request as routing sees it: for the hot path, and for a dry run."""

from __future__ import annotations

from collections.abc import Mapping

from moongate.gateway.body import Body, find_session_key, find_user
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import ends_session
from moongate.gateway.legs import may_hand_over, stays_whole
from moongate.gateway.live_settings import LiveSettings
from moongate.gateway.prompt import ReadPrompt
from moongate.gateway.routes import Route
from moongate.router import RejectReason, Request, RequestId, Role


class RequestReader:
    """Asks the core what is served, and the settings what is allowed."""

    def __init__(self, live: LiveSettings, driver: Driver) -> None:
        self._live = live
        self._core = driver.core

    def find_model(self, body: Body) -> str:
        """Return the model that a request is for. Raises: GatewayError (404, 400, 503)."""
        cards = self._core.fleet.model_cards()
        if body.model is None:
            if len(cards) == 1:
                return next(iter(cards))
            raise GatewayError(
                400, "model: missing; several are served", "invalid_request", "model"
            )
        if body.model in cards:
            return body.model
        fleet = list(self._core.fleet)
        if not fleet or any(instance.facts is None for instance in fleet):
            raise self.unavailable()
        raise GatewayError(
            404, f"the model {body.model[:200]!r} does not exist", "model_not_found", "model"
        )

    def find_policy(self, headers: Mapping[str, str]) -> str | None:
        """Return the policy that a request asks for, where the operator allows that.

        Raises: GatewayError (400).
        """
        name = headers.get("x-moongate-policy")
        if name is None or not self._live.current.policy.allow_override:
            return None
        if not self._core.has_policy(name):
            raise GatewayError(
                400, f"x-moongate-policy: unknown policy {name[:64]!r}", "invalid_request"
            )
        return name

    def request(
        self,
        request_id: RequestId,
        route: Route,
        body: Body,
        headers: Mapping[str, str],
        read: ReadPrompt,
        model: str,
        policy: str | None,
        *,
        has_room: bool = True,
    ) -> Request:
        """Return the request for this model, by this policy (see `find_model`, `find_policy`).

        `has_room`: for one more hand-off. Raises: GatewayError (400).
        """
        hands_over = self._core.fleet.has_prefill(model)
        return Request(
            id=request_id,
            model=model,
            prompt=read.prompt,
            is_prompt_missing=read.fallback is not None,
            session_key=find_session_key(headers, body, self._live.current.session.header),
            tie_key=find_user(body),
            policy=policy,
            may_hand_over=hands_over and has_room and may_hand_over(route, body),
            stays_whole=hands_over and self._stays_whole(route, body, model),
            ends_session=ends_session(headers),
        )

    def _stays_whole(self, route: Route, body: Body, model: str) -> bool:
        """Tell whether only an instance that does both can serve it. Raises: GatewayError (400)."""
        if not stays_whole(route, body):
            return False
        serving = self._core.fleet.serving(model)
        if any(instance.spec.role is Role.BOTH for instance in serving):
            return True
        name = "echo" if body.top.get("prompt_logprobs") is None else "prompt_logprobs"
        message = f"{name}: not possible here, where prompts and answers are computed apart"
        raise GatewayError(400, message, "invalid_request", name)

    def unavailable(self, retry_after_s: float | None = None) -> GatewayError:
        """Return the refusal when no instance can take a request now."""
        seconds = max(1, round(retry_after_s or self._live.current.health.interval_s))
        return GatewayError(
            503, "no instance can take the request now", RejectReason.NO_INSTANCE.value,
            headers={"retry-after": str(seconds)},
        )  # fmt: skip
