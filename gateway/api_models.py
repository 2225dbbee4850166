"""`/v1/models`: what the fleet serves, merged from what each instance said of itself.

Answered from the last descriptions, so one slow or dead instance delays and hides nothing.
"""

from __future__ import annotations

from typing import Any

from moongate.router import RouterCore


def list_models(core: RouterCore) -> dict[str, Any]:
    """Return the list of models that a healthy instance serves, each once."""
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
    return {"object": "list", "data": list(cards.values())}
