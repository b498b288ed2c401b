"""API keys: who may ask, under which name."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from optimc.errors import ConfigError, Fault

ENVIRONMENT_NAME = "OPTIMC_API_KEYS"
MIN_KEY_CHARS = 16
"""Shorter keys can be guessed."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_KEY = re.compile(r"[!-~]+")  # what goes through an HTTP header as it is: visible ASCII


class KeyRing:
    """Named API keys. Only their SHA-256 digests are kept: no error, log or dump can show a key."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    @classmethod
    def from_text(cls, text: str, *, source: str = "API keys") -> KeyRing:
        """Read keys, one a line: `name:key`, or `key` alone, which is then named key1, key2, .. by its place among all;
        `#` begins a comment line. Raises ConfigError listing every line that is no key, without showing it."""
        return cls(_read(source, text.splitlines(), unit="line"))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> KeyRing | None:
        """Read keys from OPTIMC_API_KEYS, separated by commas; None if it is not set or empty. Raises ConfigError."""
        text = environment.get(ENVIRONMENT_NAME, "")
        return cls(_read(ENVIRONMENT_NAME, text.split(","), unit="entry")) if text.strip() else None

    @classmethod
    def from_file(cls, path: Path) -> KeyRing:
        """Read keys from a file of `from_text`'s form. Raises ConfigError."""
        try:
            text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        except OSError as error:
            raise ConfigError("options", [Fault("--api-key-file", f"{path}: {error.strerror or error}")]) from None
        except UnicodeDecodeError:  # the error object holds the bytes
            raise ConfigError("options", [Fault("--api-key-file", f"{path} is not UTF-8 text")]) from None
        return cls.from_text(text, source=str(path))

    @property
    def names(self) -> tuple[str, ...]:
        """The keys' names, in their order."""
        return tuple(self._digests)

    def name_of(self, authorization: str | None) -> str | None:
        """Return whose key an Authorization header (`Bearer KEY`, as Starlette decodes it) holds; None if nobody's.

        Every key is compared, each in the same time whatever it has in common with the given one.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = sha256(key.strip(" ").encode("latin-1", "replace")).digest()
        found = None
        for name, expected in self._digests.items():
            if hmac.compare_digest(digest, expected):
                found = name
        return found if scheme.lower() == "bearer" else None


def _read(source: str, lines: Sequence[str], *, unit: str) -> dict[str, bytes]:
    digests: dict[str, bytes] = {}
    faults: list[Fault] = []
    for number, line in enumerate(lines, 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        name, separator, key = (part.strip() for part in entry.partition(":"))
        if not separator:
            name, key = f"key{len(digests) + 1}", entry
        problem = _problem(name, key, digests)
        if problem is None:
            digests[name] = _digest(key)
        else:
            faults.append(Fault(f"{unit} {number}", problem))
    if not digests and not faults:
        faults.append(Fault("", f"holds no key; each {unit} is name:key"))
    if faults:
        raise ConfigError(source, faults)
    return digests


def _problem(name: str, key: str, digests: Mapping[str, bytes]) -> str | None:
    """Say what is wrong with an entry, if anything: never by showing it."""
    if not _NAME.fullmatch(name):
        return "a key's name has 1 to 64 letters, digits, '_', '-' and '.'"
    if not _KEY.fullmatch(key):
        return "a key is visible ASCII without spaces"
    if len(key) < MIN_KEY_CHARS:
        return f"the key has {len(key)} characters; at least {MIN_KEY_CHARS} are needed"
    if name in digests:
        return f"the name '{name}' is taken by an earlier key"
    if _digest(key) in digests.values():
        return "the key is the same as an earlier one"
    return None


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
