"""Strategies for what comes from outside: JSON of any form, bytes of any kind, and what nearly is right."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

T = TypeVar("T")

quick = settings(deadline=None, max_examples=int(os.environ.get("MOONGATE_FUZZ_EXAMPLES", "40")))
"""For tests of what comes from outside: `make soak` tries many more examples."""

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)


def values(keys: st.SearchStrategy[str], max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Return JSON values whose objects have these keys."""
    return st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5),
        max_leaves=max_leaves,
    )


def objects(*names: str, max_leaves: int = 12) -> st.SearchStrategy[dict[str, Any]]:
    """Return objects with some of these fields, whose values are anything that has such fields."""
    keys = st.sampled_from(names) | st.text(max_size=3)
    return st.dictionaries(keys, values(keys, max_leaves), max_size=8)


def texts_of(value: Any) -> st.SearchStrategy[bytes]:
    """Return ways in which a value may be written as JSON."""
    ways = [
        json.dumps(value).encode(),
        json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        json.dumps(value, indent=1).encode(),
        json.dumps(value, separators=(",", ":")).encode(),
        b"\xef\xbb\xbf" + json.dumps(value).encode(),
    ]
    return st.sampled_from(ways)


def tried(call: Callable[[], T], *refusals: type[Exception]) -> T | Exception:
    """Return what a call returns, or the refusal that it raises; that has to say why."""
    try:
        return call()
    except refusals as error:
        refusal = error
    assert str(refusal)
    return refusal


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Return the bytes with something cut out, put in or changed."""
    start = draw(st.integers(0, len(whole)))
    end = draw(st.integers(start, min(len(whole), start + 8)))
    return whole[:start] + draw(st.binary(max_size=4)) + whole[end:]


def pieces_of(draw: st.DrawFn, whole: bytes, cuts_max: int = 6) -> list[bytes]:
    """Return the bytes in pieces, none of them empty."""
    cuts = draw(st.lists(st.integers(1, max(len(whole) - 1, 1)), max_size=cuts_max, unique=True))
    bounds = [0, *sorted(cuts), len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(bounds)]
    return [piece for piece in pieces if piece]
