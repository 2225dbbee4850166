"""The configuration's keys: who may ask, and what for; which certificates are shown and trusted.

Whatever is named here (a variable, a file) is looked at when the configuration is checked, so that a key that
isn't there or a certificate of another key is told by `moongate check`, by name and without its content.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from moongate.gateway.config.setting_section import Name, Section

KEYS_MAX = 1000
"""Each is compared with what a client sends, which takes 0.1 µs."""

KEY = re.compile(r"^[!-~]{1,512}$")
"""Visible ASCII: what a header can hold without being quoted."""

_ONE_KEY = "expected one key of visible ASCII characters, 512 at most: no space, no line end"

KEY_FILE_BYTES_MAX = 4096
PerMinute = Annotated[int, Field(ge=1, le=1_000_000_000)]


class KeyUnreadable(ValueError):
    """A key can't be had from where it should be. The text names the place, never the key."""


class KeySettings(Section):
    """One key that clients may show, and what it is good for."""

    tenant: Name  # whose it is; a tenant's keys share cached prompts and stored responses
    key_env: str | None = None  # variable with the key
    key_file: str | None = None  # file with nothing but the key; read again when it changes
    # Requests begun, by all keys of the tenant that state the same rates. None: as many as come.
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None  # of prompts and of answers; None: as many as come
    # Names that it may ask for, served names or aliases; None: all.
    models: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    # Cache prompts with those of all others who share: the gateway sets no cache_salt.
    shares_cache: bool = False

    @model_validator(mode="after")
    def _check(self) -> KeySettings:
        if (self.key_env is None) == (self.key_file is None):
            raise ValueError("expected either key_env or key_file")
        self.read(os.environ)
        return self

    @property
    def source(self) -> str:
        """Return where the key is, as errors and logs name it."""
        return f"key_env {self.key_env}" if self.key_env else f"key_file {self.key_file}"

    def read(self, environment: Mapping[str, str]) -> str:
        """Return the key as it is now. Raises: KeyUnreadable."""
        if self.key_env is not None:
            key = environment.get(self.key_env, "")
            if not key:
                raise KeyUnreadable(f"key_env: the variable {self.key_env} is not set")
        else:
            key = _read_file(self.key_file or "")
        if not KEY.fullmatch(key):
            # What it holds is not told.
            raise KeyUnreadable(f"{self.source}: {_ONE_KEY}")
        return key


def _read_file(path: str) -> str:
    """Raises: KeyUnreadable."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise KeyUnreadable(f"key_file: {path} can't be read: {error.strerror}") from error
    return content.decode("latin-1").strip()


class AuthSettings(Section):
    """Keys. Without `forward_client_key` a client's key never reaches an engine."""

    # Keys of clients; none: no key is asked for.
    keys: Annotated[list[KeySettings], Field(max_length=KEYS_MAX)] = Field(default_factory=list)
    # Variable with a secret that tenants' cache salts are made of; None: of each tenant's first key.
    salt_env: str | None = None
    forward_client_key: bool = False  # pass clients' keys and cookies on to engines
    admin_key_env: str | None = None  # variable with the key that /admin asks for

    @model_validator(mode="after")
    def _check(self) -> AuthSettings:
        for name, variable in (("admin_key_env", self.admin_key_env), ("salt_env", self.salt_env)):
            if variable is not None and not os.environ.get(variable):
                raise ValueError(f"{name}: the variable {variable} is not set")
        if self.admin_key_env is not None and not KEY.fullmatch(os.environ[self.admin_key_env]):
            raise ValueError(f"admin_key_env {self.admin_key_env}: {_ONE_KEY}")
        seen: dict[str, str] = {}
        if self.admin_key_env is not None:
            seen[os.environ[self.admin_key_env]] = f"admin_key_env {self.admin_key_env}"
        for number, one in enumerate(self.keys):
            other = seen.setdefault(one.read(os.environ), f"keys[{number}] ({one.source})")
            if other != f"keys[{number}] ({one.source})":
                raise ValueError(f"keys[{number}] ({one.source}) is the same key as {other}")
        return self


class ListenTlsSettings(Section):
    """The certificate that the gateway shows, and whose certificates clients must have."""

    cert: str  # file with the certificate and those between it and its root, PEM
    key: str  # file with its private key, PEM, without a password
    client_ca: str | None = (
        None  # file with roots; clients without a certificate of theirs are refused
    )

    @model_validator(mode="after")
    def _check(self) -> ListenTlsSettings:
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """Return what a listener needs. Raises: ValueError naming the file that is wrong."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        load_chain(context, self.cert, self.key)
        if self.client_ca is not None:
            load_roots(context, "client_ca", self.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class InstanceTlsSettings(Section):
    """How an engine behind https is trusted, and what the gateway shows it."""

    ca: str | None = None  # file with the roots that are trusted, PEM; None: those of the system
    cert: str | None = None  # file with the gateway's own certificate, for engines that ask for one
    key: str | None = None  # file with its private key, PEM, without a password

    @model_validator(mode="after")
    def _check(self) -> InstanceTlsSettings:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key: expected both or none")
        self.context()
        return self

    def context(self) -> ssl.SSLContext:
        """Return what connections need. Raises: ValueError naming the file that is wrong."""
        context = ssl.create_default_context()
        if self.ca is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the system's
            load_roots(context, "ca", self.ca)
        if self.cert is not None and self.key is not None:
            load_chain(context, self.cert, self.key)
        return context


def load_roots(context: ssl.SSLContext, name: str, path: str) -> None:
    """Raises: ValueError, with this key's name."""
    _check_readable(name, path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ValueError(f"{name}: {path} has no certificate in PEM") from error


def load_chain(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Raises: ValueError naming `cert` or `key`."""
    _check_readable("cert", cert)
    _check_readable("key", key)
    try:
        # Asked for a password, OpenSSL would wait at the terminal.
        context.load_cert_chain(cert, key, password=_refuse_password("key", key))
    except ssl.SSLError as error:
        if "KEY_VALUES_MISMATCH" in str(error):
            raise ValueError(f"key: {key} is not the key of the certificate in {cert}") from error
        name, path = ("cert", cert) if not _has_certificate(cert) else ("key", key)
        what = "certificate" if name == "cert" else "private key"
        raise ValueError(f"{name}: {path} has no {what} in PEM") from error


def _refuse_password(name: str, path: str) -> Callable[[], str]:
    def refuse() -> str:
        raise ValueError(f"{name}: {path} has a password; expected a key without one")

    return refuse


def _has_certificate(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        return False
    return True


def _check_readable(name: str, path: str) -> None:
    """Raises: ValueError."""
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{name}: {path} can't be read: {error.strerror}") from error
