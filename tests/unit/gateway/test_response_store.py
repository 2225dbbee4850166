"""Stored responses: found by tenant and id, kept once, within bounds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from moongate.gateway.responses.response_store import OVERHEAD_BYTES, ResponseStore, StoredResponse

TTL_S = 100.0


def a_store(bytes_max: int = 1 << 20) -> ResponseStore:
    return ResponseStore(TTL_S, bytes_max)


def turn(
    name: str, previous: StoredResponse | None = None, tenant: str = "", text: bytes = b"x"
) -> StoredResponse:
    return StoredResponse(tenant, name, previous, b"i:" + text, b"o:" + text, b"r:" + text)


def test_a_response_is_found_by_its_tenant_only() -> None:
    store = a_store()
    response = turn("resp_1", tenant="a")
    store.put(response, 0.0)
    assert store.find("a", "resp_1", 1.0) is response
    assert store.find("b", "resp_1", 1.0) is None
    assert store.find("a", "resp_2", 1.0) is None


def test_the_history_is_all_items_in_their_order() -> None:
    first = StoredResponse("", "1", None, b"a,b", b"c", b"")
    second = StoredResponse("", "2", first, b"d", b"", b"")
    third = StoredResponse("", "3", second, b"e", b"f", b"")
    assert third.history() == b"a,b,c,d,e,f"
    assert first.history() == b"a,b,c"


def test_a_response_expires_after_its_last_use() -> None:
    store = a_store()
    store.put(turn("a"), 0.0)
    assert store.find("", "a", TTL_S - 1) is not None
    assert store.find("", "a", 2 * TTL_S - 2) is not None
    assert store.find("", "a", 3 * TTL_S) is None
    assert (len(store), store.bytes_used) == (0, 0)


def test_using_a_turn_uses_those_before_it() -> None:
    store = a_store()
    first = turn("a")
    store.put(first, 0.0)
    store.put(turn("b", first), 0.0)
    store.find("", "b", TTL_S - 1)
    assert store.find("", "a", TTL_S + 1) is first


def test_the_longest_unused_go_first() -> None:
    size = turn("a").size_bytes
    store = a_store(2 * size)
    for now, name in enumerate("ab"):
        store.put(turn(name), float(now))
    store.find("", "a", 2.0)
    store.put(turn("c"), 3.0)
    assert [store.find("", name, 4.0) is not None for name in "abc"] == [True, False, True]
    assert store.bytes_used == 2 * size


def test_a_turn_keeps_those_before_it_whole() -> None:
    store = a_store()
    first = turn("a")
    store.put(first, 0.0)
    second = turn("b", first)
    store.put(second, 1.0)
    assert store.remove("", "a")
    assert store.find("", "a", 2.0) is None
    assert second.history() == b"i:x,o:x,i:x,o:x"
    assert store.bytes_used == first.size_bytes + second.size_bytes
    assert store.remove("", "b")
    assert store.bytes_used == 0
    assert not store.remove("", "b")


def test_what_went_while_a_turn_went_on_takes_room_again() -> None:
    store = a_store()
    first = turn("a")
    store.put(first, 0.0)
    store.remove("", "a")
    second = turn("b", first)
    store.put(second, 1.0)
    assert store.bytes_used == first.size_bytes + second.size_bytes


def test_what_is_too_large_is_not_kept_and_costs_nobody_else() -> None:
    store = a_store(3 * turn("a").size_bytes)
    first = turn("a")
    store.put(first, 0.0)
    store.put(turn("b", text=b"x" * 5000), 1.0)
    assert (store.find("", "a", 2.0), store.find("", "b", 2.0)) == (first, None)
    line = first
    for number in range(5):
        line = turn(str(number), line)
        store.put(line, 3.0)
    assert store.find("", "1", 4.0) is not None
    assert store.find("", "4", 4.0) is None
    assert store.bytes_used <= 3 * first.size_bytes


def test_the_same_id_replaces() -> None:
    store = a_store()
    store.put(turn("a", text=b"long" * 100), 0.0)
    latest = turn("a")
    store.put(latest, 1.0)
    assert store.find("", "a", 2.0) is latest
    assert (len(store), store.bytes_used) == (1, latest.size_bytes)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "find", "remove"]),
        st.integers(0, 9),
        st.integers(0, 9),
        st.floats(0, 40),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(STEPS)
def test_bytes_are_those_of_all_that_can_be_reached(
    steps: list[tuple[str, int, int, float]],
) -> None:
    store, now = a_store(6 * (OVERHEAD_BYTES + 20)), 0.0
    for kind, number, other, pause in steps:
        now += pause
        if kind == "put":
            store.put(turn(str(number), store.find("", str(other), now)), now)
        elif kind == "find":
            store.find("", str(number), now)
        else:
            store.remove("", str(number))
        kept = list(store._responses.values())
        reached = {id(one): one for response in kept for one in response.line()}
        assert store.bytes_used == sum(one.size_bytes for one in reached.values())
        assert store.bytes_used <= 6 * (OVERHEAD_BYTES + 20)
        used_at = [one.used_at for one in kept]
        assert used_at == sorted(used_at)
