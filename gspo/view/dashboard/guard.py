"""Authentication and security headers of the dashboard.

In: any request. Out: the application's response, or a refusal. The checks are those of `network/loopback.py`. The
page's own files are public: they exchange the one-time key after the `#` of the link for the token at `/api/session`
and keep it in the browser's local storage. A cookie would not do, because a browser sends cookies to every port of a
host, and so to any other program that listens there. Invariant: every other path needs the token.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from gspo.network.loopback import AccessControl, same

HEADERS = {
    **AccessControl.headers,
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
NO_KEY = (
    "This page needs the link that 'gspo watch' printed; each link opens one browser. "
    "Each time a link is used, a new one is printed.\n"
)
SESSION = "/api/session"
PUBLIC = ("/", "/page/")
"""The page's own files: this path, and everything below this folder."""


class SessionKeys:
    """The session token and the one-time key of the next link."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.token = secrets.token_urlsafe(32)
        self._once = secrets.token_urlsafe(32)
        self._announce = announce

    @property
    def once(self) -> str:
        """The key of the next link."""
        return self._once

    def exchange(self, key: str) -> bool:
        """Use a key. A valid key is replaced by a new one."""
        if not same(key, self._once):
            return False
        self._once = secrets.token_urlsafe(32)
        # A used link is worthless in a browser's history or a shell's scrollback.
        self._announce(self._once)
        return True


class Guard(AccessControl):
    """The access control of the dashboard. Its requests have no body."""

    headers = HEADERS

    def __init__(self, app: Any, keys: SessionKeys) -> None:
        super().__init__(app, keys.token)
        self.keys = keys

    def public(self, path: str) -> bool:
        page, folder = PUBLIC
        return path == page or path.startswith(folder)

    def unauthorized(self, scope: Mapping[str, Any], bearer: str) -> tuple[int, str]:
        if scope["path"] == SESSION and scope["method"] == "GET" and self.keys.exchange(bearer):
            return 200, self.keys.token
        return 401, NO_KEY
