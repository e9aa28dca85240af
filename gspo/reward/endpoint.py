"""Requests to the endpoint of a model, with retries and deadlines.

In: the address of an OpenAI-compatible server, the name of an environment variable with its key, JSON. Out: the JSON of
the response. Invariant: the key is read from the environment, goes to this address only (redirects are not followed),
and appears in no message. A request ends by its deadline. A failure that may pass (429, 5xx, no connection, no JSON) is
retried with exponential backoff, and not before the time that `Retry-After` names.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from gspo.errors import ConfigError, RewardError
from gspo.network.http_calls import HttpCalls, Response
from gspo.redact import HIDDEN, redacted, sounds_secret
from gspo.reward.function import RewardWarning, one_line

MOST_BYTES = 8 << 20
"""Limit on the size of a response: a judgment or a few numbers."""
BACKOFF_S = 0.5
"""Wait before the first retry. It doubles with each further one."""
LONGEST_WAIT_S = 30.0
"""Limit on the wait that backoff alone causes."""
START_S = 15.0
"""Time limit for the request that shows whether the endpoint is there."""
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class EndpointError(Exception):
    """The endpoint refused a request or cannot be reached. The message holds no secret."""


class Unavailable(EndpointError):
    """The endpoint does not answer, or answers with errors that may pass."""


class _Transient(Exception):
    """One request failed in a way that is worth a retry."""

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A response and what it took."""

    value: Any
    retries: int


class Endpoint:
    """One server. Several threads may call it."""

    def __init__(self, url: str, *, where: str, key_env: str = "", retries: int = 0) -> None:
        """`where`: the table of options, for messages."""
        parts = checked_url(url, where)
        self._where = where
        self._url = url.rstrip("/")
        self._base = parts.path.rstrip("/")
        self._key_env = key_env
        self._key = read_key(key_env, where) if key_env else ""
        self._retries = retries
        self._calls = HttpCalls(parts.netloc, most_bytes=MOST_BYTES, tls=parts.scheme == "https")
        if self._key and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            warnings.warn(
                f"{where}.url: the key in ${key_env} travels unencrypted to {parts.hostname}; use https if you can",
                RewardWarning,
                stacklevel=2,
            )

    def check(self, model: str, path: str = "/models") -> None:
        """Raise an error if the server cannot be reached or refuses the key. Costs nothing: it lists the models."""
        try:
            listed = self._retried("GET", path, None, time.monotonic() + START_S, START_S, retries=1).value
        except (EndpointError, TimeoutError) as error:
            if isinstance(error, _Missing):  # not every server has a list
                return
            raise RewardError(f"{self._where}.url: {error}; start the server, or correct url and key_env") from None
        entries = listed.get("data") if isinstance(listed, dict) else None
        names = [str(e.get("id")) for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []
        if names and model not in names:
            known = one_line(", ".join(names[:10]), 200)
            warnings.warn(
                f"{self._where}.model: {model!r} is not among the models that {self._url} lists: {known}",
                RewardWarning,
                stacklevel=2,
            )

    def post(self, path: str, body: Mapping[str, Any], *, until: float, limit_s: float) -> Answered:
        """Send JSON until there is an answer, the retries are used up, or `until` (monotonic) has passed. One request
        takes at most `limit_s`. Raises `EndpointError` or `TimeoutError`."""
        return self._retried("POST", path, json.dumps(body).encode(), until, limit_s, self._retries)

    def _retried(
        self, method: str, path: str, payload: bytes | None, until: float, limit_s: float, retries: int
    ) -> Answered:
        for attempt in range(retries + 1):
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            try:
                return Answered(value=self._once(method, path, payload, min(left_s, limit_s)), retries=attempt)
            except _Transient as error:
                reason = str(error)
                # Random, so that many requests that failed together do not return together.
                backoff_s = min(LONGEST_WAIT_S, BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
                wait_s = max(error.after_s, backoff_s)
            left_s = until - time.monotonic()
            if left_s > 0 and attempt == retries:
                raise Unavailable(f"{reason} ({retries + 1} tries)")
            if wait_s >= left_s:
                raise TimeoutError(f"{reason}; no time for another try (reward.timeout_s)")
            time.sleep(wait_s)
        raise TimeoutError(f"{self._url}{path}: no answer in time (reward.timeout_s)")

    def _once(self, method: str, path: str, payload: bytes | None, limit_s: float) -> Any:
        headers = {"Accept": "application/json", "User-Agent": "gspo"}
        headers |= {"Content-Type": "application/json"} if payload is not None else {}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            response = self._calls.send(method, self._base + path, headers=headers, payload=payload, timeout_s=limit_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _Transient(self._safe(f"{self._url}{path}: {type(error).__name__}: {error}")) from None
        return self._parsed(path, response)

    def _parsed(self, path: str, response: Response) -> Any:
        status = response.status
        where = f"{self._url}{path}: status {status}"
        # The key is removed before the text is cut, so that no part of it remains.
        excerpt = self._safe(response.body[:100_000].decode(errors="replace"))[:300]
        if status == 200:
            try:
                return json.loads(response.body)
            except (ValueError, RecursionError):
                raise _Transient(f"{self._url}{path}: the response is not JSON: {excerpt}") from None
        if status in (408, 409, 425, 429) or status >= 500:
            raise _Transient(f"{where}: {excerpt}", _retry_after_s(response.headers))
        if 300 <= status < 400:
            target = self._safe(response.headers.get("location", "elsewhere"))
            raise EndpointError(f"{where}: it redirects to {target}, which is not followed; set url to the new address")
        if status in (401, 403):
            held = f"the key in ${self._key_env} is not accepted" if self._key else "it needs a key; set key_env"
            raise EndpointError(f"{where}: {held}: {excerpt}")
        if status in (404, 405):
            raise _Missing(f"{where}: no such path or model: {excerpt}")
        raise EndpointError(f"{where}: refused: {excerpt}")

    def _safe(self, text: str) -> str:
        """One line without secrets. Servers quote the key in their errors."""
        text = text.replace(self._key, HIDDEN) if self._key else text
        return one_line(redacted(text[:100_000], []), 1000)


class _Missing(EndpointError):
    """There is no such path."""


def checked_url(url: Any, where: str) -> SplitResult:
    """The parts of an address. Raises `ConfigError` unless it is plain http or https."""
    fix = "write it as https://host/v1 or http://host:port/v1"
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid or not url.isascii() or any(c.isspace() or ord(c) < 32 for c in url):
        raise ConfigError(f"{where}.url: not an http or https address; {fix}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(f"{where}.url: must hold no user, password, query or fragment; {fix}, and set key_env")
    return parts


def check_key_env(key_env: Any, where: str) -> None:
    """Raise `ConfigError` unless this is the name of a set variable. Its value, which may be the key, is not quoted."""
    named = isinstance(key_env, str) and _VARIABLE.fullmatch(key_env) is not None
    if not named or not sounds_secret(key_env):
        raise ConfigError(
            f"{where}.key_env: must be the NAME of an environment variable that holds the key, in capitals and ending "
            "in _KEY or _TOKEN, for example JUDGE_API_KEY; values of such variables are removed from all records"
        )
    read_key(key_env, where)


def read_key(key_env: str, where: str) -> str:
    """The key in the environment."""
    key = os.environ.get(key_env, "").strip()
    if not key:
        raise ConfigError(f"{where}.key_env: the environment variable {key_env} is not set; export it before the run")
    # http.client would quote an invalid header in its error.
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{where}.key_env: the value of {key_env} is not a key (at least 8 printable characters without spaces); "
            "export it again"
        )
    return key


def ask_all(items: Sequence[Item], ask: Callable[[Item], Answer], *, concurrency: int) -> list[Answer | Exception]:
    """`ask` for each item, in threads, in order; an exception in its place if it failed.

    Once as many requests in a row as twice the threads found the endpoint unavailable, the others are not made: each
    would wait for its own deadline."""
    failed_in_row: list[Exception] = []

    def tried(item: Item) -> Answer | Exception:
        if len(failed_in_row) >= max(4, 2 * concurrency):
            last = failed_in_row[-1]
            return type(last)(f"not asked, because {len(failed_in_row)} requests in a row failed: {last}")
        try:
            answer = ask(item)
        except (Unavailable, TimeoutError) as error:
            failed_in_row.append(error)
            return error
        except Exception as error:
            return error
        failed_in_row.clear()
        return answer

    with ThreadPoolExecutor(max_workers=max(1, min(concurrency, len(items)))) as threads:
        return list(threads.map(tried, items))


def ask_once_each(
    items: Mapping[str, Item], keys: Sequence[str], ask: Callable[[Item], Answer], *, concurrency: int
) -> list[Answer | Exception]:
    """The answers for these keys of `items`, as `ask_all` gives them: one request for all that have the same key."""
    answers = dict(zip(items, ask_all(list(items.values()), ask, concurrency=concurrency), strict=True))
    return [answers[key] for key in keys]


def sendable(text: str) -> str:
    """Text that is valid Unicode. Lone surrogates would make a server refuse the request."""
    return text.encode("utf-8", "replace").decode()


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The wait that a response asks for, in seconds or as a date; 0 if it asks for none."""
    header = headers.get("retry-after", "")
    try:
        seconds = float(header)
    except ValueError:
        try:
            # By the clock of the server: the one of this machine may be wrong, or jump.
            now = parsedate_to_datetime(headers.get("date", ""))
            seconds = (parsedate_to_datetime(header) - now).total_seconds()
        except (TypeError, ValueError, OverflowError):
            return 0.0
    return seconds if 0.0 <= seconds < 1e9 else 0.0
