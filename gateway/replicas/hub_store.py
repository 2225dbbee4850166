"""What the workers of one machine share, where there is no Redis: a few of its commands, on a dictionary.

Pure: `now` is passed in. Just what `shared_state.py`'s callers use, with Redis' meaning, so that they need not
know which of the two they speak to. Bounded by bytes: past it what has an end goes, the one that was written or
prolonged the longest ago first (as Redis does by `volatile-lru`); what alone is larger is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Reply = int | bytes | str | None | list["Reply"]
"""As in RESP: a number, a bulk string, a simple string, null, an array."""

ENTRY_BYTES = 200
"""What an entry takes beside its key and value."""


class CommandError(Exception):
    """A command that is refused; the text is what the client is told."""


@dataclass(slots=True)
class _Entry:
    value: bytes | dict[bytes, bytes]
    expires_at: float | None = None

    @property
    def size_bytes(self) -> int:
        if isinstance(self.value, bytes):
            return len(self.value)
        return sum(len(k) + len(v) + ENTRY_BYTES for k, v in self.value.items())


class HubStore:
    """Strings, and fields of a hash, with an end. Keys and values are bytes."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: dict[bytes, _Entry] = {}
        self._commands: dict[str, Callable[[Sequence[bytes], float], Reply]] = {
            "DEL": self._delete,
            "EXISTS": self._exists,
            "EXPIRE": self._expire,
            "GET": self._get,
            "GETDEL": self._get_and_delete,
            "GETEX": self._get_and_expire,
            "HDEL": self._delete_field,
            "HGETALL": self._get_fields,
            "HSET": self._set_field,
            "MOONGATE.TAKE": self._take,
            "SET": self._set,
        }
        self.size_bytes = 0

    def knows(self, name: str) -> bool:
        return name in self._commands

    def perform(self, name: str, arguments: Sequence[bytes], now: float) -> Reply:
        """Return a command's reply. Raises: CommandError."""
        try:
            return self._commands[name](arguments, now)
        except (IndexError, ValueError) as error:
            raise CommandError(f"ERR wrong arguments for '{name.lower()}'") from error

    def sweep(self, now: float) -> None:
        """Drop what has ended. Cost: O(entries)."""
        for key in [*self._entries]:
            self._find(key, now)

    def __len__(self) -> int:
        return len(self._entries)

    # --- commands ---------------------------------------------------------------------------------

    def _set(self, arguments: Sequence[bytes], now: float) -> Reply:
        key, value, *options = arguments
        expires_at: float | None = None
        returns_old = False
        while options:
            option = options.pop(0).upper()
            if option == b"GET":
                returns_old = True
            elif option in (b"EX", b"PX"):
                expires_at = now + int(options.pop(0)) / (1 if option == b"EX" else 1000)
            else:
                raise ValueError(option)
        entry = self._find(key, now)
        old = _string_of(entry) if entry is not None else None
        self._put(key, _Entry(value, expires_at))
        return old if returns_old else "OK"

    def _get(self, arguments: Sequence[bytes], now: float) -> Reply:
        (key,) = arguments
        entry = self._find(key, now)
        return _string_of(entry) if entry is not None else None

    def _get_and_expire(self, arguments: Sequence[bytes], now: float) -> Reply:
        key, option, seconds = arguments
        if option.upper() != b"EX":
            raise ValueError(option)
        self._expire((key, seconds), now)
        return self._get((key,), now)

    def _get_and_delete(self, arguments: Sequence[bytes], now: float) -> Reply:
        value = self._get(arguments, now)
        self._delete(arguments, now)
        return value

    def _delete(self, arguments: Sequence[bytes], now: float) -> Reply:
        found = [key for key in arguments if self._find(key, now) is not None]
        for key in found:
            self._drop(key)
        return len(found)

    def _exists(self, arguments: Sequence[bytes], now: float) -> Reply:
        return sum(self._find(key, now) is not None for key in arguments)

    def _expire(self, arguments: Sequence[bytes], now: float) -> Reply:
        key, seconds = arguments
        ends_after_s = int(seconds)
        entry = self._find(key, now)
        if entry is not None:
            entry.expires_at = now + ends_after_s
            self._entries[key] = self._entries.pop(key)
        return int(entry is not None)

    def _set_field(self, arguments: Sequence[bytes], now: float) -> Reply:
        key, field, value = arguments
        entry = self._find(key, now)
        fields, expires_at = {}, None
        if entry is not None:
            fields, expires_at = dict(_fields_of(entry)), entry.expires_at
        is_new = field not in fields
        self._put(key, _Entry({**fields, field: value}, expires_at))
        return int(is_new)

    def _get_fields(self, arguments: Sequence[bytes], now: float) -> Reply:
        (key,) = arguments
        entry = self._find(key, now)
        fields = _fields_of(entry) if entry is not None else {}
        return [part for pair in fields.items() for part in pair]

    def _delete_field(self, arguments: Sequence[bytes], now: float) -> Reply:
        key, field = arguments
        entry = self._find(key, now)
        fields = dict(_fields_of(entry)) if entry is not None else {}
        if entry is None or fields.pop(field, None) is None:
            return 0
        self._drop(key)
        if fields:
            self._put(key, _Entry(fields, entry.expires_at))
        return 1

    def _take(self, arguments: Sequence[bytes], now: float) -> Reply:
        """What `shared_rates.py` has as a script for Redis, with the same words."""
        count = int(arguments[0])
        keys, how, given = arguments[1 : 1 + count], arguments[1 + count], arguments[2 + count :]
        numbers = [*map(float, given)]
        if not keys or len(numbers) != 3 * count:
            raise ValueError(numbers)
        draws = [numbers[n : n + 3] for n in range(0, len(numbers), 3)]  # cost, rate, burst
        levels: list[float] = []
        for key, (_, rate, burst) in zip(keys, draws, strict=True):
            entry = self._find(key, now)
            text = _string_of(entry).decode() if entry is not None else f"{burst} {now}"
            level, at = map(float, text.split())
            levels.append(min(burst, level + max(0.0, now - at) * rate))
        is_taken = all(level >= 1.0 for level in levels) or how == b"settle"
        for n, (key, (cost, rate, burst)) in enumerate(zip(keys, draws, strict=True)):
            if is_taken:
                levels[n] = min(burst, levels[n] - cost)
            ends_at = now + (burst - levels[n]) / rate + 1.0
            self._put(key, _Entry(f"{levels[n]!r} {now!r}".encode(), ends_at))
        return [int(is_taken), *(repr(level).encode() for level in levels)]

    # --- entries ----------------------------------------------------------------------------------

    def _find(self, key: bytes, now: float) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at is not None and entry.expires_at <= now:
            self._drop(key)
            return None
        return entry

    def _put(self, key: bytes, entry: _Entry) -> None:
        """Raises: CommandError."""
        self._drop(key)
        size_bytes = len(key) + entry.size_bytes + ENTRY_BYTES
        self._make_room(size_bytes)
        if self.size_bytes + size_bytes > self._bytes_max:
            raise CommandError("OOM what workers share is full")
        self.size_bytes += size_bytes
        self._entries[key] = entry

    def _make_room(self, size_bytes: int) -> None:
        if size_bytes > self._bytes_max:
            return
        while self.size_bytes + size_bytes > self._bytes_max:
            oldest = next((k for k, e in self._entries.items() if e.expires_at is not None), None)
            if oldest is None:
                return
            self._drop(oldest)

    def _drop(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.size_bytes -= len(key) + entry.size_bytes + ENTRY_BYTES


def _string_of(entry: _Entry) -> bytes:
    """Raises: CommandError."""
    if isinstance(entry.value, bytes):
        return entry.value
    raise CommandError("WRONGTYPE the key holds a hash")


def _fields_of(entry: _Entry) -> Mapping[bytes, bytes]:
    """Raises: CommandError."""
    if isinstance(entry.value, dict):
        return entry.value
    raise CommandError("WRONGTYPE the key holds a string")
