"""One request, or one leg of its hand-off, on its way to an instance.

The body as this instance should get it: with token ids, with what its connector is told, by way of a chat
where it has no messages. And the client's headers and address, without what is not for an engine.
Only reads exchanges.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from moongate.gateway.auth.access import Access
from moongate.gateway.auth.tenants import NO_TENANT
from moongate.gateway.dialects.messages_bridge import Bridge, bridge_for
from moongate.gateway.dialects.routes import ApiFamily, PromptKind
from moongate.gateway.driver import Driver
from moongate.gateway.headers import request_headers
from moongate.gateway.instances.links import Link, Links
from moongate.gateway.prompts.prompt import PromptPipeline
from moongate.gateway.proxy.exchange import Exchange
from moongate.gateway.proxy.handing_over import Opened
from moongate.gateway.proxy.id_forwarding import IdForwarding, with_params
from moongate.gateway.proxy.legs import one_token_body
from moongate.gateway.telemetry.metrics import Metrics
from moongate.router import Holder
from moongate.router.handoff import TransferParams


class Sender:
    """Sends requests to instances."""

    def __init__(
        self,
        links: Links,
        driver: Driver,
        prompts: PromptPipeline,
        id_forwarding: IdForwarding,
        access: Access,
        metrics: Metrics,
    ) -> None:
        self._links = links
        self._driver = driver
        self._prompts = prompts
        self._id_forwarding = id_forwarding
        self._access = access
        self._metrics = metrics

    async def send(
        self,
        exchange: Exchange,
        holder: Holder,
        link: Link,
        params: TransferParams | None,
        *,
        is_one_token: bool = False,
        is_release: bool = False,
        on_sent: Callable[[], object] | None = None,
    ) -> Opened:
        """Return the engine's answer with its first bytes. Raises: UpstreamError.

        vLLM sends a stream's headers before it has computed anything, so only the first bytes of
        the body show that an answer has begun. From `params` on it is for the legs of a hand-off.
        """
        body = exchange.body
        headers = self._headers(exchange, holder, link)
        raw, target = body.raw, self._target(exchange)
        bridge = self._bridge_to(exchange, link)
        if bridge is not None:
            raw, target = bridge.body, bridge.path
        if is_one_token:
            raw = one_token_body(raw, PromptKind.CHAT if bridge else exchange.route.kind)
        if is_one_token or any((exchange.turn, exchange.renaming, bridge)):
            # It is read here, and not unpacked.
            headers = [header for header in headers if header[0] != b"accept-encoding"]
        pieces = with_params(raw, self._ids(exchange, link), params)
        answer = await link.upstream.send(
            target, headers, pieces, on_sent=on_sent, may_exceed=is_release
        )
        try:
            return Opened(answer, await answer.read(), bridge)
        except BaseException:
            answer.close()
            raise

    def _target(self, exchange: Exchange) -> str:
        """Return the address as engines get it: without a query that has a client's key in it."""
        target = exchange.client.target
        if "?" not in target or exchange.settings.auth.forward_client_key:
            return target
        is_secret = self._access.tenants.are_in(unquote_to_bytes(target))
        return exchange.route.template if is_secret else target

    def _bridge_to(self, exchange: Exchange, link: Link) -> Bridge | None:
        """Return the way around for an instance that has no messages, None where none is needed."""
        is_messages = exchange.route.family is ApiFamily.ANTHROPIC
        if not is_messages or self._links.has_messages(link.id):
            return None
        manners = self._prompts.manners(exchange.account.model_label)
        return bridge_for(exchange.route, exchange.body.fields, manners)

    def _headers(self, exchange: Exchange, holder: Holder, link: Link) -> list[tuple[bytes, bytes]]:
        headers = request_headers(
            exchange.client.headers,
            request_id=exchange.account.request_id,
            forward_credentials=exchange.settings.auth.forward_client_key,
            is_secret=self._access.tenants.are_in,
            api_key=link.api_key,
            rank=holder.rank,
            is_of_tenant=exchange.client.tenant.name != NO_TENANT,
        )
        trace = exchange.account.trace
        return headers if trace is None else trace.pass_on(headers)

    def _ids(self, exchange: Exchange, link: Link) -> bytes | None:
        """Return the prompt's token ids, if the instance should get them."""
        if exchange.read.tokenized is None:
            return None
        card = self._driver.core.fleet.model_cards().get(exchange.account.model_label)
        context_tokens = card.max_model_len_tokens if card is not None else None
        ids = self._id_forwarding.ids_for(
            exchange.route, exchange.body, exchange.read, link.api, context_tokens
        )
        if ids is not None:
            self._metrics.ids_forwarded.add(1, link.id)
        return ids
