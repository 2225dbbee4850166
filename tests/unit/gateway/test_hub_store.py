"""What workers share without Redis: bounded, and gone in time. As Redis: `tests/integration/test_hub.py`."""

from __future__ import annotations

import pytest

from moongate.gateway.replicas.hub_store import ENTRY_BYTES, CommandError, HubStore


def put(store: HubStore, key: bytes, *options: bytes, size: int = 100, now: float = 0.0) -> None:
    store.perform("SET", [key, b"x" * size, *options], now)


def keys(store: HubStore, *names: bytes, now: float = 0.0) -> list[bytes]:
    return [name for name in names if store.perform("EXISTS", [name], now)]


def test_what_has_ended_is_dropped_also_if_nobody_asks() -> None:
    store = HubStore(10_000)
    put(store, b"a", b"EX", b"10")
    put(store, b"b", b"PX", b"5000")
    put(store, b"c")
    assert len(store) == 3
    store.sweep(5.0)
    assert keys(store, b"a", b"b", b"c", now=5.0) == [b"a", b"c"]
    store.sweep(10.0)
    assert len(store) == 1
    store.perform("DEL", [b"c"], 10.0)
    assert store.size_bytes == 0


def test_when_it_is_full_what_has_an_end_goes_the_oldest_first() -> None:
    store = HubStore(4 * (100 + 1 + ENTRY_BYTES))
    put(store, b"a")
    for key in (b"b", b"c", b"d"):
        put(store, key, b"EX", b"100")
    store.perform("EXPIRE", [b"b", b"100"], 0.0)
    put(store, b"e", b"EX", b"100")
    assert keys(store, b"a", b"b", b"c", b"d", b"e") == [b"a", b"b", b"d", b"e"]
    put(store, b"f", size=300)
    assert keys(store, b"a", b"b", b"d", b"e", b"f") == [b"a", b"e", b"f"]


def test_what_finds_no_room_is_refused_and_nothing_goes_for_what_can_never_fit() -> None:
    store = HubStore(1000)
    put(store, b"a", b"EX", b"10")
    with pytest.raises(CommandError, match="OOM"):
        put(store, b"b", size=2000)
    assert keys(store, b"a") == [b"a"]
    put(store, b"c", size=700)
    with pytest.raises(CommandError, match="OOM"):
        put(store, b"d", size=700)
    assert keys(store, b"a", b"c") == [b"c"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GET", []), ("GET", [b"a", b"b"]), ("SET", [b"a"]), ("SET", [b"a", b"b", b"EX"]),
        ("SET", [b"a", b"b", b"EX", b"x"]), ("SET", [b"a", b"b", b"NX"]), ("EXPIRE", [b"a", b"x"]),
        ("GETEX", [b"a", b"PX", b"1"]), ("HSET", [b"h", b"f"]), ("MOONGATE.TAKE", [b"a"]),
    ],
)  # fmt: skip
def test_what_is_asked_wrongly_is_refused(name: str, words: list[bytes]) -> None:
    store = HubStore(1000)
    with pytest.raises(CommandError, match="wrong arguments"):
        store.perform(name, words, 0.0)
