"""`/v1/models`: what the fleet serves, merged from what each instance said of itself.

Answered from the last descriptions, so one slow or dead instance delays and hides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moongate.gateway.auth.tenants import ANYBODY, Tenant
from moongate.router import RouterCore


def list_models(
    core: RouterCore, aliases: Mapping[str, str], tenant: Tenant = ANYBODY
) -> dict[str, Any]:
    """Return the list of models that a healthy instance serves, each once, and of their aliases: of those that
    the tenant may ask for."""
    cards: dict[str, Any] = {}
    for instance in core.fleet:
        if not instance.is_healthy or instance.facts is None:
            continue
        for card in instance.facts.models:
            cards.setdefault(
                card.name,
                {
                    "id": card.name,
                    "object": "model",
                    "created": 0,
                    "owned_by": "moongate",
                    "max_model_len": card.max_model_len_tokens,
                },
            )
    for alias, served in aliases.items():
        if served in cards:
            cards[alias] = {**cards[served], "id": alias, "root": served}
    data = [card for name, card in cards.items() if tenant.may_use(name, aliases.get(name))]
    return {"object": "list", "data": data}
