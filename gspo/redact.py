"""Secrets taken out of what is shown or written. In: text or nested values. Out: the same with secrets replaced.

By value: what the environment holds under a name that sounds like a secret. By key: settings with such a name. By shape:
keys and tokens that their issuers give a recognizable form, and the user part of an address. Invariant: every pattern takes
time that is linear in the text, because the text may come from anywhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "[hidden]"
SHORTEST = 8
"""Values shorter than this are words, not secrets."""
_DIRECTORIES = {"PWD", "OLDPWD"}
"""Every shell exports its working directory under these names, and `pwd` is also short for a password."""
_NAME = re.compile(
    r"(^|_)(token|auth|apikey|passw(or)?d|pwd|authorization|cookie|credential|secret|bearer)s?$|(^|_)(token|secret|password|credentials?|api_?keys?|access_keys?|private_keys?)(_|$)|_keys?$"
)
_ISSUED = (
    r"sk-(?:[A-Za-z0-9]{1,12}-){0,3}[A-Za-z0-9_]{16}[A-Za-z0-9_-]*",  # OpenAI, Anthropic and kin
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"hf_[A-Za-z0-9]{15,}",  # Hugging Face
    r"gh[pousr]_[A-Za-z0-9]{16,}",  # GitHub
    r"github_pat_[A-Za-z0-9_]{20,}",
    r"glpat-[A-Za-z0-9_-]{16,}",  # GitLab
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",  # AWS
    r"AIza[A-Za-z0-9_-]{30,}",  # Google
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",  # Slack
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[A-Za-z0-9_-]{40,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",  # JSON Web Tokens
)
_SHAPES = (
    # Not in the middle of a word: `task-...` is none.
    re.compile(rf"(?<![A-Za-z0-9_-])(?P<secret>{'|'.join(_ISSUED)})"),
    re.compile(r"(?P<secret>-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----(?:[A-Za-z0-9+/=\s]|\\[nr])*)"),
    re.compile(r"\b(?:bearer|basic)\s{1,4}(?P<secret>(?=[A-Za-z._~+/=-]{0,200}[0-9])[A-Za-z0-9._~+/=-]{16,})", re.I),
    re.compile(
        r"(?:api|access|secret|wandb)_?-?(?:api_?-?)?key[\"']?\s{0,4}[=:]\s{0,4}[\"']?"
        r"(?P<secret>(?=[A-Za-z_+/=-]{0,200}[0-9])[A-Za-z0-9_+/=-]{16,})",
        re.I,
    ),
)
_PASSWORD = re.compile(r"[a-z][a-z0-9+.-]{0,15}://[^/\s:@\"'\\]{0,256}:(?P<secret>[^/\s@\"'\\]{1,256})@", re.I)
_SHOWN_ONLY = (
    re.compile(r"[a-z][a-z0-9+.-]{0,15}://(?P<secret>[^/\s:@\"'\\]{0,256}(?::[^/\s@\"'\\]{0,256})?)@", re.I),
    re.compile(r"[?&](?:[a-z_-]{0,20}(?:token|key|secret|password|signature))=(?P<secret>[^&\s\"'#<>\\]+)", re.I),
)
"""Parts of addresses that are hidden where they are shown, but are no reason to refuse a setting."""


def sounds_secret(name: str) -> bool:
    """Whether a setting or variable of this name holds a secret (`HF_TOKEN`, `X-Api-Key`, `authToken`; not `max_tokens`)."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    return bool(_NAME.search(words)) and not words.endswith("_tokens") and words != "tokens"


def known_secrets() -> list[str]:
    """Secrets of this process's environment, the longest first."""
    names = [name for name in os.environ if name not in _DIRECTORIES and sounds_secret(name)]
    values = {os.environ[name] for name in names if len(os.environ[name]) >= SHORTEST}
    return sorted(values, key=len, reverse=True)


def holds_secret(text: str) -> bool:
    """Whether a part of a text has the shape of a secret."""
    return any(shape.search(text) for shape in (*_SHAPES, _PASSWORD))


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Text without known secrets, without what has the shape of one, and without users and keys of addresses."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    for pattern in _patterns(text):
        text = pattern.sub(_without, text)
    return text


def _patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """Those that can match; most texts hold no address."""
    return (*_SHOWN_ONLY, *_SHAPES) if "://" in text else _SHAPES


def _without(match: re.Match[str]) -> str:
    begin, end = match.span("secret")
    return match.string[match.start() : begin] + HIDDEN + match.string[end : match.end()]


def redacted_pieces(pieces: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """Pieces of one text: those that a secret reaches into are hidden as a whole."""
    text = "".join(pieces)
    if redacted(text, secrets) == text:
        return list(pieces)
    spans = [m.span() for secret in secrets for m in re.finditer(re.escape(secret), text)]
    spans += [m.span("secret") for pattern in _patterns(text) for m in pattern.finditer(text)]
    kept, begin = [], 0
    for piece in pieces:
        end = begin + len(piece)
        kept.append(HIDDEN if any(begin < last and first < end for first, last in spans) else piece)
        begin = end
    return kept


def redacted_values(value: Any, secrets: Sequence[str] = (), *, secret: bool = False) -> Any:
    """Nested values without secrets in their texts, and without the texts under a name that sounds secret."""
    if isinstance(value, Mapping):
        return {redacted(str(k), secrets): redacted_values(v, secrets, secret=secret or sounds_secret(str(k))) for k, v in value.items()}  # fmt: skip
    if isinstance(value, list | tuple):
        return [redacted_values(v, secrets, secret=secret) for v in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if secret and value else redacted(value, secrets)
