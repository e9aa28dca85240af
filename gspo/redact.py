"""Redact secrets from everything that is displayed or written.

In: text or nested values. Out: the same with secrets replaced. Secrets are found by value (environment variables with a
secret-sounding name), by key (settings with such a name) and by shape (API keys and tokens with a known prefix, and the
user part of a URL). Invariant: every pattern runs in time linear in the text, because the text is untrusted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

HIDDEN = "[hidden]"
SHORTEST = 8
"""Shorter values are treated as ordinary words, not as secrets."""
_DIRECTORIES = {"PWD", "OLDPWD"}
"""Every shell exports its working directory under these names, and `pwd` also abbreviates "password"."""
_NAME = re.compile(
    r"(^|_)(token|auth|apikey|passw(or)?d|pwd|authorization|cookie|credential|secret|bearer)s?$"
    r"|(^|_)(token|secret|password|credentials?|api_?keys?|access_keys?|private_keys?)(_|$)"
    r"|_keys?$"
)
_ISSUED = (
    r"sk-(?:[A-Za-z0-9]{1,12}-){0,3}[A-Za-z0-9_]{16}[A-Za-z0-9_-]*",  # OpenAI, Anthropic and similar
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
    # The lookbehind skips matches inside a word, such as the `sk-` of `task-...`.
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
"""Parts of URLs that are redacted on display but do not make a setting invalid."""


def sounds_secret(name: str) -> bool:
    """Whether a setting or variable with this name holds a secret.

    True for `HF_TOKEN`, `X-Api-Key` and `authToken`; false for `max_tokens`.
    """
    # authToken, X-Api-Key and HF_TOKEN become auth_token, x_api_key and hf_token.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name).lower()
    return bool(_NAME.search(words)) and not words.endswith("_tokens") and words != "tokens"


def known_secrets() -> list[str]:
    """Secrets in this process's environment, longest first."""
    names = [name for name in os.environ if _names_secret(name)]
    values = {os.environ[name] for name in names if len(os.environ[name]) >= SHORTEST}
    # Longest first: a secret that contains another must be replaced before its substring is.
    return sorted(values, key=len, reverse=True)


@cache  # of the names in the environment only: they are few, and each record of a run asks for all of them
def _names_secret(variable: str) -> bool:
    return variable not in _DIRECTORIES and sounds_secret(variable)


def holds_secret(text: str) -> bool:
    """Whether any part of a text has the shape of a secret."""
    return any(shape.search(text) for shape in (*_SHAPES, _PASSWORD))


def redacted(text: str, secrets: Sequence[str]) -> str:
    """Text with known secrets, secret-shaped strings and credentials in URLs replaced."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    for pattern in _patterns(text):
        text = pattern.sub(_hide_secret_group, text)
    return text


def _patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """The patterns that can match. Most texts contain no URL, so its patterns are skipped."""
    return (*_SHOWN_ONLY, *_SHAPES) if "://" in text else _SHAPES


def _hide_secret_group(match: re.Match[str]) -> str:
    begin, end = match.span("secret")
    return match.string[match.start() : begin] + HIDDEN + match.string[end : match.end()]


def redacted_pieces(pieces: Sequence[str], secrets: Sequence[str]) -> list[str]:
    """Redact a text that is split into pieces, such as tokens. A piece that overlaps a secret is hidden as a whole."""
    text = "".join(pieces)
    # Most texts hold no secret, and need no positions.
    if redacted(text, secrets) == text:
        return list(pieces)
    spans = [m.span() for secret in secrets for m in re.finditer(re.escape(secret), text)]
    spans += [m.span("secret") for pattern in _patterns(text) for m in pattern.finditer(text)]
    shown = []
    begin = 0
    for piece in pieces:
        end = begin + len(piece)
        shown.append(HIDDEN if any(begin < last and first < end for first, last in spans) else piece)
        begin = end
    return shown


def redacted_values(value: Any, secrets: Sequence[str] = (), *, secret: bool = False, by_name: bool = True) -> Any:
    """Nested values with secrets redacted from strings.

    All strings under a secret-sounding key are hidden, unless `by_name` is false."""
    if isinstance(value, Mapping):
        # Keys, too: a table by header or by address may hold a secret in its keys.
        return {
            redacted(str(k), secrets): redacted_values(
                v, secrets, secret=secret or (by_name and sounds_secret(str(k))), by_name=by_name
            )
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted_values(v, secrets, secret=secret, by_name=by_name) for v in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if secret and value else redacted(value, secrets)
