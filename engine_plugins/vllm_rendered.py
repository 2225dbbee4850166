"""What an engine's render routes tell of a prompt: its token ids, and its images' places and names.

Source: vLLM 0.32 `GenerateRequest`, the answer of `/v1/…/render` (served with `--enable-scale-out`), and
`generate_block_hash_extra_keys`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from moongate.router.blocks import extend_chain, root_hash
from moongate.router.model import BlockHash, BlockSpace, ExtraKeys


class RenderedError(ValueError):
    """An answer is not what a render route gives."""


class Media(NamedTuple):
    """An image, sound or film in a prompt. `name`: a hash of what it shows."""

    offset_tokens: int
    length_tokens: int
    name: str


class Rendered(NamedTuple):
    """A prompt as the engine would compute it. `media`: by their places."""

    token_ids: list[int]
    media: tuple[Media, ...]


def read_rendered(answer: object) -> Rendered:
    """Return what the answer of a render route says. Raises: RenderedError."""
    if isinstance(answer, list) and len(answer) == 1:
        (answer,) = answer  # of a completion: one for each of its prompts
    ids = answer.get("token_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise RenderedError('expected a list of integers in "token_ids"')
    features = answer.get("features") if isinstance(answer, dict) else None
    return Rendered(ids, tuple(sorted(_media(features))) if features is not None else ())


def hash_rendered(
    space: BlockSpace, tokens: bytes, media: Sequence[Media], cache_salt: str | None
) -> list[BlockHash]:
    """Return the chain of a prompt (packed ids) with media, as events tell its blocks."""
    size = space.block_size_tokens
    keys: list[ExtraKeys | None] = []
    for start in range(0, len(tokens) // 4 - size + 1, size):
        inside: list[object] = [
            (one.name, one.offset_tokens - start)
            for one in media
            if one.offset_tokens < start + size and start < one.offset_tokens + one.length_tokens
        ]
        if start == 0 and cache_salt:
            inside.append(cache_salt)
        keys.append(tuple(inside) or None)
    return extend_chain(root_hash(space), tokens, size, keys)


def _media(features: Any) -> list[Media]:
    try:
        return [
            Media(int(place["offset"]), int(place["length"]), str(name))
            for kind, names in features["mm_hashes"].items()
            for name, place in zip(names, features["mm_placeholders"][kind], strict=True)
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RenderedError("features: expected hashes and places of the same media") from error
