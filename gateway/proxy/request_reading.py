"""From a body and its headers to the request as routing sees it: for the hot path, and for a dry run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import assert_never

from moongate.gateway.auth.access import Access
from moongate.gateway.auth.tenants import Tenant
from moongate.gateway.config.live_settings import LiveSettings
from moongate.gateway.dialects.body import Body, find_session_key, find_user, name_session
from moongate.gateway.dialects.body_limits import check_limits
from moongate.gateway.dialects.routes import Route
from moongate.gateway.driver import Driver
from moongate.gateway.errors import GatewayError
from moongate.gateway.headers import ends_session
from moongate.gateway.prompts.prompt import READ_BYTES_MAX, ReadPrompt
from moongate.gateway.proxy.legs import may_hand_over, stays_whole
from moongate.gateway.proxy.waiting_wishes import read_wishes
from moongate.router import Reject, RejectReason, Request, RequestId, Role


class RequestReader:
    """Asks the core what is served, and the settings what is allowed."""

    def __init__(self, live: LiveSettings, driver: Driver, access: Access) -> None:
        self._live = live
        self._access = access
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
        raise _no_model(body.model)

    def check_rights(self, tenant: Tenant, *names: str | None) -> None:
        """Raises: GatewayError (404) if a tenant may not use the model that is called so, as if there were none."""
        asked = names[0]
        if asked is not None and not tenant.may_use(*names):
            raise _no_model(asked)

    def check_limits(self, body: Body, headers: Mapping[str, str]) -> None:
        """Refuse a body that has more of something than it may. Raises: GatewayError (400).

        A large one is taken apart for that only if its prompt will be read.
        """
        if body.is_outlined and len(body.raw) <= READ_BYTES_MAX:
            policy = self._core.get_policy(self.find_policy(headers))
            fields = body.fields if policy.reads_prompts else body.top
        else:
            fields = body.top
        check_limits(fields, len(body.raw), self._live.current.limits)

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
        tenant: Tenant,
        *,
        has_room: bool = True,
    ) -> Request:
        """Return the request for this model, by this policy (see `find_model`, `find_policy`).

        `has_room`: for one more hand-off. Raises: GatewayError (400).
        """
        hands_over = self._core.fleet.has_prefill(model)
        may_wait = self._core.admission is not None
        wishes = read_wishes(headers, body, route, may_wait=may_wait)
        return Request(
            id=request_id,
            model=model,
            prompt=read.prompt,
            is_prompt_missing=read.fallback is not None,
            session_key=tenant.session_key(self._find_session(headers, body)),
            tie_key=tenant.session_key(find_user(body)),
            policy=policy,
            may_hand_over=hands_over and has_room and may_hand_over(route, body),
            stays_whole=hands_over and self._stays_whole(route, body, model),
            ends_session=ends_session(headers),
            tenant=tenant.name,
            priority=wishes.priority,
            size_tokens=wishes.size_tokens,
            answers=wishes.answers,
            answer_tokens_max=wishes.answer_tokens_max,
            wait_s_max=wishes.wait_s_max,
        )

    def _find_session(self, headers: Mapping[str, str], body: Body) -> str | None:
        """Return the session's key; one that has a client's API key in it by its name only, since it is shown."""
        key = find_session_key(headers, body, self._live.current.session.header)
        is_secret = key is not None and self._access.tenants.are_in(key.encode())
        return name_session(key) if key is not None and is_secret else key

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

    def rejection(self, reject: Reject) -> GatewayError:
        """Return what a client is told that the core has refused."""
        seconds = str(max(1, math.ceil(reject.retry_after_s or 0)))
        match reject.reason:
            case RejectReason.UNKNOWN_MODEL:
                return GatewayError(404, "the model does not exist", "model_not_found", "model")
            case RejectReason.NO_INSTANCE:
                return self.unavailable(reject.retry_after_s)
            case RejectReason.QUEUE_FULL:
                text = "no instance has room, and more requests wait than may"
            case RejectReason.QUEUE_TIMEOUT:
                text = "no instance has room for the request in the time that it may wait"
            case _:
                assert_never(reject.reason)
        return GatewayError(503, text, reject.reason.value, headers={"retry-after": seconds})

    def unavailable(self, retry_after_s: float | None = None) -> GatewayError:
        """Return the refusal when no instance can take a request now."""
        seconds = max(1, round(retry_after_s or self._live.current.health.interval_s))
        return GatewayError(
            503, "no instance can take the request now", RejectReason.NO_INSTANCE.value,
            headers={"retry-after": str(seconds)},
        )  # fmt: skip


def _no_model(name: str) -> GatewayError:
    return GatewayError(404, f"the model {name[:200]!r} does not exist", "model_not_found", "model")
