"""Refuses to open a model to strangers by accident."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from optimc.errors import ConfigError, Fault
from optimc_runtime.server.keys import KeyRing

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
"""As browsers send it (https://www.rfc-editor.org/rfc/rfc6454): lower case, no path, not even a slash."""


def check_exposure(host: str, keys: KeyRing | None, *, allow: bool) -> None:
    """Raise ConfigError if others than this machine can reach `host` and anybody may ask, unless that is `allow`ed."""
    if keys is None and not allow and not is_loopback(host):
        raise ConfigError(
            "options",
            [
                Fault(
                    "--host",
                    f"{host} is reachable from outside and there is no API key; give --api-key-file, "
                    "or --insecure-no-key if something in front of this server checks who asks",
                )
            ],
        )


def check_origins(origins: Sequence[str]) -> None:
    """Raise ConfigError for origins that no browser would ever send: a typing error would fail there, unexplained."""
    faults = [
        Fault(
            "--cors-origin", f"{origin!r} is no origin; write it as https://example.org or http://localhost:3000, or *"
        )
        for origin in origins
        if origin != "*" and not _ORIGIN.fullmatch(origin)
    ]
    if faults:
        raise ConfigError("options", faults)


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. Of a name other than localhost nobody can tell: False."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
