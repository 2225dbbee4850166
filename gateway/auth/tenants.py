"""Who asks: keys of clients, and what a key is good for.

`Tenants` is made of the configuration, never changed, and replaced as a whole: a request belongs to the tenant that
its key named when its head came, whatever is reloaded meanwhile. A tenant's name stands where its things are kept
(stored responses, sessions, rates), its cache salt where engines keep prompts.

Salts: HMAC-SHA256 of the tenant's name under a secret, so they are the same after restarts and on all replicas, and
nobody can compute them from the name. The secret is `auth.salt_env`'s, else the tenant's first key: then a new first
key means a cold cache.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from moongate.gateway.auth.auth_settings import AuthSettings, KeyUnreadable
from moongate.gateway.auth.rates import UNLIMITED, RateLimits
from moongate.gateway.errors import GatewayError

NO_TENANT = ""
"""Whose everything is where no keys are asked for."""

_SALT_PURPOSE = b"moongate cache salt\0"


@dataclass(frozen=True, slots=True)
class Tenant:
    """What one key is good for. `cache_salt` None: bodies keep what they have."""

    name: str = NO_TENANT
    cache_salt: str | None = None
    models: frozenset[str] | None = None  # that it may ask for; None: all
    limits: RateLimits = UNLIMITED
    rate_name: str = NO_TENANT  # under which its requests are counted

    def may_use(self, *names: str | None) -> bool:
        """Tell whether a model may be asked for that has one of these names."""
        return self.models is None or any(name in self.models for name in names)

    def session_key(self, key: str | None) -> str | None:
        """Return a session's key as it is known here: no tenant's is another's, however alike."""
        return key if key is None or self.name == NO_TENANT else f"{self.name}/{key}"


ANYBODY = Tenant()


@dataclass(frozen=True, slots=True)
class _Entry:
    digest: bytes
    tenant: Tenant


class Tenants:
    """All keys. None configured: everybody is `ANYBODY`."""

    def __init__(self, tenants_by_key: Mapping[str, Tenant], others: Iterable[str] = ()) -> None:
        """`others`: keys that are no tenant's, and not to be passed on either."""
        self._entries = tuple(_Entry(_digest(key), one) for key, one in tenants_by_key.items())
        self._finder = KeyFinder([*tenants_by_key, *others])

    @classmethod
    def from_settings(
        cls, settings: AuthSettings, environment: Mapping[str, str] = os.environ
    ) -> Self:
        """Return the tenants of a configuration, key files read as they are now.

        Raises: KeyUnreadable (a ValueError), naming the place.
        """
        secret = environment.get(settings.salt_env, "") if settings.salt_env else ""
        first_keys: dict[str, str] = {}
        tenants: dict[str, Tenant] = {}
        admin_key = environment.get(settings.admin_key_env, "") if settings.admin_key_env else ""
        for one in settings.keys:
            key = one.read(environment)
            if key in tenants or key == admin_key:
                raise KeyUnreadable(f"{one.source} is the same key as another")
            salt_secret = secret or first_keys.setdefault(one.tenant, key)
            limits = RateLimits(one.requests_per_minute, one.tokens_per_minute)
            tenants[key] = Tenant(
                one.tenant,
                None if one.shares_cache else make_salt(salt_secret, one.tenant),
                frozenset(one.models) if one.models is not None else None,
                limits,
                f"{one.tenant}:{one.requests_per_minute}:{one.tokens_per_minute}",
            )
        return cls(tenants, [admin_key] if admin_key else [])

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, headers: Mapping[str, str]) -> Tenant:
        """Return whose key a request shows, as a bearer token or in `x-api-key`.

        Takes as long whichever key it is, or none: digests are compared, and all of them. Cost: O(keys).
        Raises: GatewayError (401).
        """
        if not self._entries:
            return ANYBODY
        found: Tenant | None = None
        for given in _given_keys(headers):
            digest = _digest(given)
            for entry in self._entries:
                if hmac.compare_digest(entry.digest, digest):
                    found = entry.tenant
        if found is None:
            raise GatewayError(
                401,
                "the API key is missing or wrong; send it as authorization: Bearer KEY, or in x-api-key",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found

    def named(self, name: str) -> Tenant:
        """Return the first of a tenant's keys' rights, for a dry run. Raises: GatewayError (400)."""
        for entry in self._entries:
            if entry.tenant.name == name:
                return entry.tenant
        raise GatewayError(400, f"there is no tenant {name[:64]!r}", "invalid_request", "tenant")

    def are_in(self, text: bytes) -> bool:
        """Tell whether a text has any of the keys somewhere: it is not to be passed on, nor told."""
        return self._finder.is_any_in(text)


BLOCK_BYTES_MAX = 16
"""Of `KeyFinder`: longer blocks would be hardly rarer, and there would be more of them."""


class KeyFinder:
    """Finds whether a text has any of many keys somewhere, at a cost that doesn't grow with their number.

    The text is looked at in blocks, half as long as the shortest key at most. Wherever a key stands, one of them lies
    whole in its last bytes, the last two blocks' worth but one. Blocks that no key has there are nearly all that there are:
    keys differ at their ends, so that what they all begin with doesn't count. Where one has, only those places are looked
    at where a key with this block would have to begin, each place at most once for each length of keys.
    """

    def __init__(self, keys: Collection[str]) -> None:
        """`keys`: none of them empty."""
        self._keys = frozenset(key.encode() for key in keys)
        shortest = min(map(len, self._keys), default=1)
        size = self._size = min((shortest + 1) // 2, BLOCK_BYTES_MAX)
        # By what is in a block: how far into a key that would be, and how long the key is.
        self._places: dict[bytes, set[tuple[int, int]]] = {}
        for key in self._keys:
            for offset in range(len(key) - 2 * size + 1, len(key) - size + 1):
                block = key[offset : offset + size]
                self._places.setdefault(block, set()).add((offset, len(key)))

    def is_any_in(self, text: bytes) -> bool:
        """Cost: O(text), times the lengths that keys have at worst."""
        size, places, keys = self._size, self._places, self._keys
        if not keys:
            return False
        hits = [n for n in range(0, len(text), size) if text[n : n + size] in places]
        return any(
            text[n - offset : n - offset + length] in keys
            for n in hits
            for offset, length in places[text[n : n + size]]
            if offset <= n
        )


def make_salt(secret: str, tenant: str) -> str:
    """Return a tenant's cache salt: 43 characters that engines take (vLLM: 128 at most, none of `@/\\`)."""
    made = hmac.digest(secret.encode(), _SALT_PURPOSE + tenant.encode(), "sha256")
    return base64.urlsafe_b64encode(made).rstrip(b"=").decode()


def _given_keys(headers: Mapping[str, str]) -> Iterable[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    if "x-api-key" in headers:
        yield headers["x-api-key"].strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
