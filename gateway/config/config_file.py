"""The configuration file as it is now, and what it is told apart by.

It is read as a whole each time: a new file under its name (an editor's, a ConfigMap's changed link) is
noticed as well as one that was written in place within the same second.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moongate.gateway.config.settings import Settings
from moongate.gateway.config.settings_text import Path_, SettingsError, parse_settings, point_out

DIGEST_HEX_DIGITS = 12
"""48 bits: exact as a number in a metric."""


@dataclass(frozen=True, slots=True)
class Content:
    """What the file said at one time. `digest`: short, of its bytes as they are (variables by name)."""

    file: str
    text: str
    digest: str

    def point_out(self, path: Path_, message: str) -> str:
        """Return one line about a key: file, line, key, message."""
        return point_out(self.text, self.file, path, message)


class Loaded(NamedTuple):
    """The settings that a file had, and what they were made of."""

    file: ConfigFile
    content: Content
    settings: Settings


class ConfigFile:
    """One file. `host` and `port`: of the command line, in place of the file's; None: the file's."""

    def __init__(self, path: Path, *, host: str | None = None, port: int | None = None) -> None:
        self._path = path
        self._host = host
        self._port = port

    def __str__(self) -> str:
        return str(self._path)

    def load(self) -> Loaded:
        """Return the settings that it has now. Raises: SettingsError."""
        content = self.read()
        return Loaded(self, content, self.settings(content))

    def read(self) -> Content:
        """Return what it says. Raises: SettingsError."""
        try:
            data = self._path.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError([f"{self._path}: can't be read: {error}"]) from error
        digest = hashlib.sha256(data).hexdigest()[:DIGEST_HEX_DIGITS]
        return Content(str(self._path), text, digest)

    def settings(self, content: Content) -> Settings:
        """Return the settings, variables and what they name as they are now. Raises: SettingsError."""
        settings = parse_settings(content.text, content.file)
        given = {"host": self._host, "port": self._port}
        said = {name: value for name, value in given.items() if value is not None}
        listen = settings.listen.model_copy(update=said)
        return settings.model_copy(update={"listen": listen})
