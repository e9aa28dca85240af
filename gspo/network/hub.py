"""Check whether the Hugging Face Hub is reachable.

In: the machine's network. Out: the name of the unreachable host, or an empty string. Invariant: a single DNS lookup, so
a machine without a network fails immediately and not after a minute of retries inside `huggingface_hub`.
"""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def unreachable_host() -> str:
    """The Hub's host if its name does not resolve. Empty if it resolves, behind a proxy, and in offline mode."""
    from huggingface_hub import constants, is_offline_mode

    host = urlsplit(constants.ENDPOINT).hostname or ""
    # Behind a proxy, local DNS often does not resolve public names, and the proxy does.
    return "" if is_offline_mode() or getproxies() or _resolves(host) else host


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True
