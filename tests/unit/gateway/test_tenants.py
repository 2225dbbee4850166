"""Keys and what they are good for: whose is it, what is it cached under, what may it ask for."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moongate.gateway.auth.access import Access
from moongate.gateway.auth.auth_settings import AuthSettings, KeyUnreadable
from moongate.gateway.auth.rates import RateLimits
from moongate.gateway.auth.tenants import ANYBODY, KeyFinder, Tenant, Tenants, make_salt
from moongate.gateway.errors import GatewayError

KEYS = {"KEY_A": "sk-alpha", "KEY_B": "sk-beta", "KEY_A2": "sk-alpha-2"}
A = {"key_env": "KEY_A", "tenant": "a"}
B = {"key_env": "KEY_B", "tenant": "b"}


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)


def settings(*keys: dict[str, Any], **others: Any) -> AuthSettings:
    return AuthSettings.model_validate({"keys": list(keys), **others})


def tenants(*keys: dict[str, Any], **others: Any) -> Tenants:
    return Tenants.from_settings(settings(*keys, **others))


def refusal(known: Tenants, headers: dict[str, str]) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        known.find(headers)
    return caught.value


def test_without_keys_everybody_is_let_in() -> None:
    assert tenants().find({}) is ANYBODY
    assert tenants().find({"authorization": "Bearer x"}) is ANYBODY
    assert not tenants().are_in(b"")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer sk-beta"},
        {"authorization": "bearer  sk-beta "},
        {"x-api-key": "sk-beta"},
        {"authorization": "Bearer of-another", "x-api-key": "sk-beta"},
        {"authorization": "Bearer sk-beta", "x-api-key": "none"},
    ],
)
def test_a_key_is_a_bearer_token_or_in_x_api_key(headers: dict[str, str]) -> None:
    assert tenants(A, B).find(headers).name == "b"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": "Bearer"},
        {"authorization": "sk-beta"},
        {"authorization": "Basic sk-beta"},
        {"authorization": "Bearer sk-bet"},
        {"authorization": "Bearer sk-beta2"},
        {"authorization": "Bearer SK-BETA"},
        {"authorization": "Bearer \udcff\u00e9"},
        {"x-api-key": ""},
        {"api-key": "sk-beta"},
    ],
)
def test_anything_else_is_refused_without_being_repeated(headers: dict[str, str]) -> None:
    error = refusal(tenants(A, B), headers)
    assert (error.status, error.code) == (401, "invalid_api_key")
    assert error.headers == {"www-authenticate": "Bearer"}
    assert "sk-" not in error.message


def test_c101_all_digests_are_compared_whichever_key_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    known = tenants(A, B)
    monkeypatch.setattr("moongate.gateway.auth.tenants.hmac.compare_digest", compare)
    counts = []
    for key in ("sk-alpha", "sk-beta", "x", "x" * 5000):
        compared.clear()
        with contextlib.suppress(GatewayError):
            known.find({"x-api-key": key})
        counts.append(len(compared))
        assert {len(digest) for pair in compared for digest in pair} == {32}
    assert counts == [2, 2, 2, 2]


def test_what_a_key_is_good_for() -> None:
    one = tenants(
        {**A, "models": ["m", "alias"], "requests_per_minute": 6, "tokens_per_minute": 7}
    ).find({"x-api-key": "sk-alpha"})
    assert one == Tenant(
        "a", make_salt("sk-alpha", "a"), frozenset({"m", "alias"}), RateLimits(6, 7), "a:6:7"
    )
    assert one.may_use("m")
    assert one.may_use("other", "m")
    assert not one.may_use("other")
    assert tenants(B).find({"x-api-key": "sk-beta"}).may_use("anything")


def test_keys_of_one_tenant_share_rates_that_are_alike_and_no_others() -> None:
    rotated = {"key_env": "KEY_A2", "tenant": "a"}
    known = tenants({**A, "requests_per_minute": 6}, {**rotated, "requests_per_minute": 6})
    names = {known.find({"x-api-key": key}).rate_name for key in ("sk-alpha", "sk-alpha-2")}
    assert len(names) == 1
    known = tenants({**A, "requests_per_minute": 6}, {**rotated, "requests_per_minute": 9})
    names = {known.find({"x-api-key": key}).rate_name for key in ("sk-alpha", "sk-alpha-2")}
    assert len(names) == 2


def test_sessions_are_the_tenants_own() -> None:
    assert Tenant("a").session_key("s") == "a/s"
    assert Tenant("a").session_key(None) is None
    assert ANYBODY.session_key("s") == "s"


# --- salts ----------------------------------------------------------------------------------------


def salt(known: Tenants, key: str) -> str | None:
    return known.find({"x-api-key": key}).cache_salt


def test_tenants_have_salts_of_their_own_that_engines_take() -> None:
    known = tenants(A, B)
    one, other = salt(known, "sk-alpha"), salt(known, "sk-beta")
    assert one is not None
    assert other is not None
    assert one != other
    for text in (one, other):
        assert len(text) == 43
        assert not set(text) & set("@/\\\0")


def test_a_salt_is_the_same_after_a_restart_and_on_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SALT", "secret")
    before = salt(tenants(A, B, salt_env="SALT"), "sk-alpha")
    assert before == make_salt("secret", "a")
    # Whatever else is configured, in whatever order; a new key changes nothing either.
    assert salt(tenants(B, A, salt_env="SALT"), "sk-alpha") == before
    rotated = {"key_env": "KEY_A2", "tenant": "a"}
    assert salt(tenants(rotated, B, salt_env="SALT"), "sk-alpha-2") == before


def test_without_a_secret_a_salt_comes_of_the_tenants_first_key() -> None:
    second = {"key_env": "KEY_A2", "tenant": "a"}
    known = tenants(B, A, second)
    assert salt(known, "sk-alpha") == salt(known, "sk-alpha-2") == make_salt("sk-alpha", "a")
    assert salt(tenants(second), "sk-alpha-2") != salt(known, "sk-alpha")


def test_a_salt_can_be_had_from_no_name_alone() -> None:
    assert make_salt("one", "a") != make_salt("two", "a")
    assert make_salt("one", "a") != make_salt("one", "b")


def test_who_shares_the_cache_has_no_salt() -> None:
    assert salt(tenants({**A, "shares_cache": True}, B), "sk-alpha") is None


# --- where keys are -------------------------------------------------------------------------------


def test_c98_a_key_is_found_wherever_it_is() -> None:
    known = tenants(A, admin_key_env="KEY_B")
    assert known.are_in(b"sk-alpha")
    assert known.are_in(b"x; k=sk-beta, y")
    assert not known.are_in(b"sk-gamma")
    assert not tenants().are_in(b"sk-alpha")


def test_a_key_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text("sk-one\n")
    access = Access(settings({"key_file": str(file), "tenant": "a"}, B), lambda: 0.0)
    headers = [(b"X-Api-Key", b"sk-one")]
    assert access.admit(headers).name == "a"
    assert not access.refresh()

    file.write_text("sk-the-second\n")
    assert access.refresh()
    with pytest.raises(GatewayError):
        access.admit(headers)
    assert access.admit([(b"authorization", b"Bearer sk-the-second")]).name == "a"
    assert not access.refresh()

    file.unlink()
    assert not access.refresh()
    assert str(file) in caplog.text
    assert access.admit([(b"authorization", b"Bearer sk-the-second")]).name == "a"
    assert len(caplog.records) == 1
    assert not access.refresh()  # told once
    assert len(caplog.records) == 1

    file.symlink_to(file)
    assert not access.refresh()  # for another reason, which is told too
    assert not access.refresh()
    assert len(caplog.records) == 2
    assert "symbolic links" in caplog.records[1].getMessage()
    assert "sk-" not in caplog.text


def test_other_keys_are_in_force_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-gamma")
    access = Access(settings(A), lambda: 0.0)
    new = settings({"key_file": str(file), "tenant": "c"}, B)
    file.unlink()
    with pytest.raises(KeyUnreadable, match="key_file"):
        access.prepare(new)
    assert access.admit([(b"x-api-key", b"sk-alpha")]).name == "a"
    file.write_text("sk-gamma")
    put_in_force = access.prepare(new)
    assert access.admit([(b"x-api-key", b"sk-alpha")]).name == "a"
    put_in_force()
    assert access.admit([(b"x-api-key", b"sk-gamma")]).name == "c"
    with pytest.raises(GatewayError):
        access.admit([(b"x-api-key", b"sk-alpha")])


@pytest.mark.parametrize(
    ("keys", "others", "reason"),
    [
        ([{"tenant": "a"}], {}, "expected either key_env or key_file"),
        ([{**A, "key_file": "/x"}], {}, "expected either key_env or key_file"),
        ([{"tenant": "a", "key_env": "NO_SUCH"}], {}, "the variable NO_SUCH is not set"),
        ([{"tenant": "a", "key_file": "/no/such"}], {}, "/no/such can't be read: No such file"),
        (
            [A, {**A, "tenant": "b"}],
            {},
            r"keys\[1\] \(key_env KEY_A\) is the same key as keys\[0\]",
        ),
        ([A], {"admin_key_env": "KEY_A"}, r"keys\[0\] .* is the same key as admin_key_env KEY_A"),
        ([A], {"salt_env": "NO_SUCH"}, "salt_env: the variable NO_SUCH is not set"),
        ([{**A, "tenant": "a/b"}], {}, "tenant"),
        ([{**A, "models": []}], {}, "models"),
        ([{**A, "requests_per_minute": 0}], {}, "requests_per_minute"),
    ],
)
def test_what_can_not_be_used_is_told_by_name(
    keys: list[dict[str, Any]], others: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        settings(*keys, **others)
    assert "sk-alpha" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "\u00e9", "x" * 513])
def test_a_key_that_no_header_can_hold_is_refused_and_not_told(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"key_file {file}: expected one key") as caught:
        settings({"tenant": "a", "key_file": str(file)})
    assert not content or content not in str(caught.value)
    if content:
        monkeypatch.setitem(os.environ, "ODD", content)
        with pytest.raises(ValueError, match="key_env ODD: expected one key"):
            settings({"tenant": "a", "key_env": "ODD"})
        with pytest.raises(ValueError, match="admin_key_env ODD: expected one key") as caught:
            AuthSettings.model_validate({"admin_key_env": "ODD"})


MANY = st.lists(st.text("ab-", min_size=1, max_size=9), max_size=5)


@given(MANY, st.text("ab-c", max_size=40), st.integers(0, 40))
def test_keys_are_found_wherever_they_stand(keys: list[str], text: str, at: int) -> None:
    finder = KeyFinder(keys)
    assert finder.is_any_in(text.encode()) == any(key in text for key in keys)
    for key in keys:
        assert finder.is_any_in((text[:at] + key + text[at:]).encode())


def test_what_all_keys_begin_or_end_with_makes_no_text_dear() -> None:
    """Whoever knows that much of them, and no key, fills headers with it."""
    begins, ends = "sk-live-of-one-organisation-" * 2, "p" * 40
    middles = [f"{n:032x}" for n in range(1000)]
    texts = [(part * 64_000)[:64_000].encode() for part in (begins, ends, begins + ends)]
    finders = [KeyFinder([f"{begins}{middle}{end}" for middle in middles]) for end in ("", ends)]

    def took_s(finder: KeyFinder, text: bytes) -> float:
        began = time.perf_counter()
        assert not finder.is_any_in(text)
        return time.perf_counter() - began

    for finder in finders:
        plain_s = min(took_s(finder, b"z" * 64_000) for _ in range(5))
        for text in texts:
            # Each place once, for one length of keys; all keys at each would be a thousand times as much.
            assert min(took_s(finder, text) for _ in range(5)) < 100 * plain_s
