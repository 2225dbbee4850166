"""From a body's bytes to the request that the core is asked about.

What the client sent becomes what engines may get; a response gets the conversation that it continues; and
the prompt is read, where the policy looks at it. Writes an exchange's `body`, `read`, `turn`, `renaming`,
`drops_usage` and `pool_prompt`; nothing has been sent anywhere when it is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moongate.gateway.auth.tenants import NO_TENANT
from moongate.gateway.config.settings import Settings
from moongate.gateway.dialects.aliases import Aliases
from moongate.gateway.dialects.body import parse_body, with_cache_salt, without_key
from moongate.gateway.dialects.connector_params import without_connector_params
from moongate.gateway.dialects.prompt_fields import read_salt
from moongate.gateway.dialects.routes import WITH_CHOICES
from moongate.gateway.dialects.stream_usage import asks_for_usage, with_usage_asked
from moongate.gateway.driver import Driver
from moongate.gateway.pool.pooling import PromptTokens
from moongate.gateway.prompts.divergence import Divergences
from moongate.gateway.prompts.prompt import PromptPipeline, ReadPrompt
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.request_reading import RequestReader
from moongate.gateway.responses.response_turns import ResponseTurns
from moongate.gateway.telemetry.metrics import Metrics
from moongate.gateway.telemetry.tracing import TOKENISE
from moongate.router import Request

PRIORITY = "priority"
"""The field by which a body says how soon engines are to compute it: lower is sooner, 0 without.

*Source:* vLLM 0.32, of all its routes, with `--scheduling-policy priority`.
"""


class Intake:
    """Takes requests in. `parse`, for a response `continue_turn`, and `read_request`, in this order."""

    def __init__(
        self,
        settings: Settings,
        reader: RequestReader,
        driver: Driver,
        prompts: PromptPipeline,
        turns: ResponseTurns,
        divergences: Divergences,
        metrics: Metrics,
    ) -> None:
        self._reader = reader
        self._driver = driver
        self._prompts = prompts
        self._turns = turns
        self._divergences = divergences
        self._metrics = metrics
        self._aliases = Aliases(settings.models.aliases)

    def renew(self, settings: Settings) -> None:
        """Make anew what is made of the settings."""
        self._aliases = Aliases(settings.models.aliases)
        self._turns.body_bytes_max = settings.limits.body_bytes_max

    def parse(self, exchange: Exchange, raw: bytes) -> None:
        """Read the body, as engines may get it.

        That is without what only the gateway may say to an engine's KV connector, without a tenant's wish to be
        computed before others, and, where the operator wants every stream's usage or it is needed for a rate, with the
        wish for it. Raises: GatewayError (400; 404 for a model that isn't the tenant's).
        """
        route, settings, tenant = exchange.route, exchange.settings, exchange.client.tenant
        asked = parse_body(raw, route)
        body, exchange.renaming = self._aliases.resolve(asked, route)
        self._reader.check_rights(tenant, asked.model, body.model)
        if not settings.limits.allow_kv_transfer_params:
            body = without_connector_params(body, route)
        if tenant.name != NO_TENANT and _overtakes(body.top):
            body = parse_body(without_key(body.raw, PRIORITY), route)
        has_usage = route.kind in WITH_CHOICES and body.is_stream
        is_metered = exchange.meter is not None and exchange.meter.counts_tokens
        asks_always = settings.observability.stream_usage == "always" or is_metered
        if asks_always and has_usage and not body.is_lenient and not asks_for_usage(body.top):
            exchange.drops_usage = True
            body = parse_body(with_usage_asked(body.raw, body.top), route)
        self._reader.check_limits(body, exchange.headers)
        if tenant.cache_salt is not None and route.is_cached:
            body = with_cache_salt(body, tenant.cache_salt)
        exchange.body = body

    async def continue_turn(self, exchange: Exchange) -> None:
        """Put before a response's body all that it continues, which is held to the same limits as one body.

        Raises: GatewayError (400; 404; 413).
        """
        tenant = exchange.client.tenant
        turn = await self._turns.begin(tenant.name, exchange.body, exchange.route)
        exchange.turn = None if turn.is_plain else turn
        if turn.body is not exchange.body:
            self._reader.check_limits(turn.body, exchange.headers)
        exchange.body = turn.body

    async def read_request(self, exchange: Exchange, *, has_room: bool) -> Request:
        """Return the request as routing sees it. `has_room`: for a hand-off. Raises: GatewayError."""
        reader, account, body = self._reader, exchange.account, exchange.body
        tenant = exchange.client.tenant
        model = account.model_label = reader.find_model(body)
        if body.model is None:  # the only one that is served
            reader.check_rights(tenant, model)
        policy = reader.find_policy(exchange.headers)
        if self._driver.core.get_policy(policy).reads_prompts:
            exchange.read = await self._read_prompt(exchange)
        account.phase_ended(TOKENISE)
        request = reader.request(
            exchange.id,
            exchange.route,
            body,
            exchange.headers,
            exchange.read,
            model,
            policy,
            tenant,
            has_room=has_room,
        )
        if exchange.meter is not None:
            exchange.meter.note_prompt(request.prompt_tokens)
        if request.session_key is not None:
            account.session_key = request.session_key
            self._note_turn(exchange, request, request.session_key)
        return request

    def _note_turn(self, exchange: Exchange, request: Request, session_key: str) -> None:
        """Let it be noticed if the turn does not begin like its session's last."""
        divergences, model = self._divergences, request.model
        fields, prompt = exchange.read.fields, exchange.read.prompt
        if fields is not None and prompt is not None:
            divergences.note(session_key, model, fields, read_salt(exchange.body), prompt)
        if request.ends_session:
            divergences.forget(session_key, model)

    async def _read_prompt(self, exchange: Exchange) -> ReadPrompt:
        """Return what is known of the prompt."""
        metrics, clock = self._metrics, self._driver.clock
        began = clock()
        read = await self._prompts.read(exchange.route, exchange.body)
        if read.prompt is not None:
            mode = "exact" if read.prompt.is_exact else "text"
            metrics.tokenize_seconds.observe(clock() - began, mode)
        if read.fallback is not None:
            metrics.route_fallback.add(1, read.fallback)
        return read

    def name_blocks(self, exchange: Exchange) -> PromptTokens:
        """Return the prompt as the pool names it; it `is_nameable`."""
        read = exchange.read
        assert read.prompt is not None
        card = self._driver.core.fleet.model_cards().get(exchange.account.model_label)
        exchange.pool_prompt = PromptTokens(
            read.prompt, read.tokens, read_salt(exchange.body), card
        )
        return exchange.pool_prompt


def _overtakes(top: Mapping[str, Any]) -> bool:
    """Tell whether a body may be computed sooner than one that says nothing.

    Only whole numbers from 0 are sure not to be: engines read others from text, too.
    """
    priority = top.get(PRIORITY, 0)
    return type(priority) is not int or priority < 0
