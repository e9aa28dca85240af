"""Secrets taken out of what is shown. In: text or nested settings. Out: the same with secrets replaced.

By value: what the environment holds under a name that sounds like a secret. By key: settings with such a name. By shape:
the user part of an address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[hidden]"
SHORTEST = 8
"""Values shorter than this are words, not secrets."""
_NAME = re.compile(
    r"(^|_)(token|auth|apikey|passw(or)?d|pwd|authorization|cookie|credential|secret|bearer)s?$|(^|_)(token|secret|password|credentials?|api_?keys?|access_keys?|private_keys?)(_|$)|_keys?$"
)
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]{0,15}://)[^/\s:@\"'\\]{0,256}(:[^/\s@\"'\\]{0,256})?@", re.I)
_QUERY = re.compile(r"([?&](?:[a-z_-]{0,20}(?:token|key|secret|password|signature))=)[^&\s\"'#]+", re.I)


def sounds_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret (`HF_TOKEN`, `X-Api-Key`, `authToken`; not `max_tokens`)."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    return bool(_NAME.search(words)) and not words.endswith("_tokens") and words != "tokens"


def known_secrets() -> list[str]:
    """Secrets of this process's environment, the longest first."""
    values = {v for k, v in os.environ.items() if sounds_secret(k) and len(v) >= SHORTEST}
    return sorted(values, key=len, reverse=True)


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Text without known secrets, and without users and keys of addresses."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if "://" in text:
        text = _QUERY.sub(rf"\1{HIDDEN}", _ADDRESS.sub(rf"\1{HIDDEN}@", text))
    return text


def redacted_settings(value: Any, secret: bool = False) -> Any:
    """Nested settings without the texts under a name that sounds secret."""
    if isinstance(value, Mapping):
        return {k: redacted_settings(v, secret or sounds_secret(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_settings(v, secret) for v in value]
    return HIDDEN if secret and isinstance(value, str) and value else value
