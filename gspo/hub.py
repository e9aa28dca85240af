"""Whether the hub can be reached.

In: the machine's network. Out: the name of a host that cannot be reached, or nothing. Invariant: one look-up of a name, so that
a machine without a network says so at once and not after a minute of a library's retries.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def unreachable_host() -> str:
    """The hub's host if its name does not resolve; empty if it does, behind a proxy, or if the user has set offline mode."""
    from huggingface_hub import constants, is_offline_mode

    host = urlsplit(constants.ENDPOINT).hostname or ""
    return "" if is_offline_mode() or getproxies() or _resolves(host) else host


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
