"""Refuses to open a model to strangers by accident."""

from __future__ import annotations

import ipaddress

from optimc.errors import ConfigError, Fault
from optimc_runtime.server.keys import KeyRing


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


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches `host`. Of a name other than localhost nobody can tell: False."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
