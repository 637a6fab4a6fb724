"""Is an address one that only this machine can reach?"""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """`host` is a name or an address, without brackets."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
