"""Prompts that can't be rendered here: the engine is asked, where it has the routes for that.

An engine has them with `--enable-scale-out` only, and takes a request's whole body anew, so it is asked
for those prompts alone that would else be known in part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from moongate.engine_plugins.vllm_rendered import (
    Media,
    RenderedError,
    hash_rendered,
    read_rendered,
)
from moongate.gateway.dialects.body import Body
from moongate.gateway.dialects.prompt_fields import read_salt
from moongate.gateway.dialects.routes import PromptKind, Route
from moongate.gateway.instances.engine_api import EngineApi, EngineCallFailed
from moongate.router import BlockSpace, Prompt
from moongate.router.blocks import pack_tokens

logger = logging.getLogger(__name__)

NOT_ASKED = frozenset(
    {"prompt_form", "previous_response", "previous_messages", "call_without_id", "lone_surrogate"}
)
"""Reasons for which a prompt isn't known that hold for the engine's own rendering too: it renders
something else each time, or the request is for several prompts, or for what only one instance stores."""


class EngineRendering:
    """Knows which engines render."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._renderers: set[EngineApi] = set()

    def note(self, api: EngineApi, *, renders: bool) -> None:
        (self._renderers.add if renders else self._renderers.discard)(api)

    async def read(
        self,
        route: Route,
        body: Body,
        reason: str,
        engines: Iterable[EngineApi],
        spaces: Sequence[BlockSpace],
    ) -> tuple[Prompt, bytes, Sequence[Media]] | None:
        """Return the prompt, its packed ids, and what it shows; None if no engine tells it in time.

        `reason`: why it isn't known here. `engines`: those that have the model, the best to ask first.
        """
        if route.kind is PromptKind.NONE or reason in NOT_ASKED or not self._renderers:
            return None
        path = f"{route.template}/render"
        api = next((api for api in engines if api in self._renderers), None)
        if api is None:
            return None
        try:
            async with asyncio.timeout(self.budget_s):
                answer = await api.post_json(path, body.raw, timeout_s=self.budget_s)
            rendered = read_rendered(answer)
            tokens = pack_tokens(rendered.token_ids)
        except (TimeoutError, EngineCallFailed, RenderedError, OverflowError) as error:
            logger.debug("%s: %s", path, error)
            return None
        salt = read_salt(body)
        chains = {space: hash_rendered(space, tokens, rendered.media, salt) for space in spaces}
        return Prompt(len(rendered.token_ids), chains), tokens, rendered.media
