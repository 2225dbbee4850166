"""What only the gateway may say to an engine's connectors, taken out of clients' bodies.

Addresses that an engine is to connect to are among it. vLLM reads it from fields of its own, and, merged over by
these, from `vllm_xargs`: there it comes as a text, of which a connector makes nothing but a crash.
"""

from __future__ import annotations

from moongate.gateway.dialects.body import Body, parse_body, without_key
from moongate.gateway.dialects.routes import Route
from moongate.gateway.errors import GatewayError

KV_TRANSFER_PARAMS = "kv_transfer_params"
CONNECTOR_FIELDS = (KV_TRANSFER_PARAMS, "ec_transfer_params")  # of KV and of encoders' caches
EXTRA_ARGUMENTS = "vllm_xargs"


def without_connector_params(body: Body, route: Route) -> Body:
    """Return a body without them. Raises: GatewayError (400) where `vllm_xargs` has one."""
    extra = body.top.get(EXTRA_ARGUMENTS)
    if isinstance(extra, dict):
        for name in CONNECTOR_FIELDS:
            if name in extra:
                message = f"{EXTRA_ARGUMENTS}: {name} is for the gateway to say"
                raise GatewayError(400, message, "invalid_request", EXTRA_ARGUMENTS)
    for name in CONNECTOR_FIELDS:
        if name in body.top:
            body = parse_body(without_key(body.raw, name), route)
    return body
