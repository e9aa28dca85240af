"""Security of the dashboard: authentication, and the contents of responses."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shown_runs import completion, make_run
from tokenizers import Tokenizer

from gspo.view.dashboard import handlers
from gspo.view.dashboard.guard import HEADERS, SessionKeys
from gspo.view.dashboard.server import application
from gspo.view.dashboard.watchlist import Watchlist
from gspo.view.report import page
from gspo.view.run_reader import RunReader
from gspo.view.terminal import watch_text

ROUTES = [
    "/",
    "/page/style.css",
    "/page/chart.js",
    "/page/tokens.js",
    "/page/app.js",
    "/api/setup",
    "/api/runs",
    "/api/runs/made",
    "/api/runs/made/about",
    "/api/runs/made/steps/5",
    "/api/runs/made/steps/5/0/0",
    "/api/runs/made/evaluations/10",
    "/api/runs/made/evaluations/10/0/0",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture(scope="module")
def served(run: Path, serve: Callable[..., Any]) -> Any:
    """Shared by all tests: if a request could end or change the session, the next test would fail."""
    return serve(run)


def test_all_routes_are_tested(tmp_path: Path) -> None:
    app = application(Watchlist([make_run(tmp_path / "made")]), SessionKeys(print)).app
    patterns = [route.path_regex for route in app.routes]
    assert all(any(p.fullmatch(path) for path in ROUTES) for p in patterns)
    assert all(route.methods == {"GET", "HEAD"} for route in app.routes)


def test_it_listens_on_loopback_only(served: Any) -> None:
    """According to the kernel's list of sockets."""
    inodes = set()
    for fd in Path(f"/proc/{served.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a file that the server has closed meanwhile
            inodes.add(os.readlink(fd))
    listening = []
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            parts = line.split()
            if f"socket:[{parts[9]}]" in inodes and (parts[3] == "0A" or name.startswith("udp")):
                listening.append(parts[1])
    assert listening == [f"0100007F:{served.port:04X}"]


@pytest.mark.parametrize("path", [*(r for r in ROUTES if "/api/" in r), "/nowhere", "/api/runs/none", "/api/session"])
def test_every_api_request_needs_the_token(served: Any, path: str) -> None:
    """The page's own files are public; everything about a run needs the token."""
    served.get("/")
    assert served.request(path).status == 401
    for wrong in ("Bearer wrong", "Bearer ", "", served.token, f"Basic {served.token}", "x" * 2000):
        assert served.request(path, headers={"Authorization": wrong}).status == 401
    assert served.request(f"{path}?key={served.token}").status == 401
    assert (
        served.request(path, headers={"Cookie": f"gspo-{served.port}={served.token}; token={served.token}"}).status
        == 401
    )
    assert served.get(path).status == (404 if "no" in path or "session" in path else 200)


@pytest.mark.parametrize("path", [*ROUTES, "/api/session", "/nowhere"])
def test_no_cookie_is_ever_set(served: Any, path: str) -> None:
    """A browser would send it to every program that listens on another port of the host."""
    served.get("/")
    assert not [name for name in served.get(path).headers if name.lower() == "set-cookie"]
    assert not [name for name in served.exchange(served.link).headers if name.lower() == "set-cookie"]
    served.link = served.next_link()


def test_a_link_opens_one_browser(run: Path, serve: Callable[..., Any]) -> None:
    served = serve(run)
    first = served.exchange(served.link)
    assert first.status == 200
    assert served.request("/api/runs", headers={"Authorization": f"Bearer {first.body.decode()}"}).status == 200
    assert served.exchange(served.link).status == 401
    second = served.next_link()
    assert served.exchange(second, method="HEAD").status == 401
    assert (
        served.request("/api/runs", headers={"Authorization": f"Bearer {second.partition('#key=')[2]}"}).status == 401
    )
    assert served.exchange(second).body == first.body


@pytest.mark.parametrize(
    "host", ["evil.com", "evil.com:80", "127.0.0.1.evil.com", "", "0.0.0.0", "localhost.evil.com:1"]
)
def test_another_host_name_is_refused(served: Any, host: str) -> None:
    """Protects against DNS rebinding."""
    assert served.get("/api/runs", Host=host).status == 421
    assert served.get("/api/runs", Host=f"localhost:{served.port}").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.com"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://127.0.0.1"},
    ],
)
def test_cross_origin_requests_are_refused(served: Any, headers: dict[str, str]) -> None:
    response = served.get("/api/runs", **headers)
    assert response.status == 403
    assert not any(k.lower().startswith("access-control") for k in response.headers)
    assert served.get("/api/runs", Origin=f"http://{served.host}").status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_allowed_and_the_run_is_not_changed(served: Any, method: str, run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in sorted(run.rglob("*"))}
    for path in ROUTES:
        served.get(path)
        response = served.request(path, method=method, headers=served.authorization)
        assert response.status == 405
    assert {p: p.stat().st_mtime_ns for p in sorted(run.rglob("*"))} == before


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/..",
        "/api/runs/%2e%2e/about",
        "/api/runs/%2e%2e%2fmade/about",
        "/api/runs//etc/passwd",
        "/api/runs/made%00/about",
        "/page/../server.py",
        "/page/%2e%2e%2fserver.py",
        "/page/index.html",
        "/api/runs/made/steps/../../about",
        "/api/runs/made/steps/-1",
        "/api/runs/made/steps/5/0/99",
        "/api/runs/made/steps/99999999999999999999",
        "/api/runs/made/steps/" + "9" * 5000,
        "/api/runs/made/steps/5/0/" + "1" * 400,
        "/api/runs/" + "x" * 3000,
        "/../../etc/passwd",
    ],
)
def test_a_url_can_only_name_a_run_on_the_watch_list(served: Any, path: str) -> None:
    assert served.get(path).status == 404


def test_invalid_queries_name_the_parameter(served: Any) -> None:
    for query, output in (
        ("points=x", b"points"),
        ("points=0", b"points"),
        ("from=x", b"from"),
        ("points=²", b"points"),
        ("points=" + "0" * 20 + "1", b"points"),
    ):
        response = served.get(f"/api/runs/made?{query.replace('²', '%C2%B2')}")
        assert response.status == 400
        assert output in response.body
    assert b"choose one of" in served.get("/api/runs/made/steps/5?only=everything").body
    assert served.get("/api/runs/made?from=nan&to=-inf").status == 200


@pytest.mark.parametrize("path", [*ROUTES, "/nowhere"])
def test_every_response_has_the_security_headers(served: Any, path: str) -> None:
    response = served.get(path)
    found = {k.lower(): v for k, v in response.headers.items()}
    assert all(found[k] == v for k, v in HEADERS.items())
    assert "unsafe" not in found["content-security-policy"]
    assert "server" not in found


def test_the_page_uses_no_other_host_and_no_inline_script() -> None:
    folder = Path(sys.modules["gspo.view.dashboard.server"].__file__ or "").parent / "page"
    for file in folder.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[a-z]+\.[a-z]", re.sub(r"(?m)(^|\s)//.*$", "", text)), file.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setTimeout\(['\"]", text
        ), file.name
    assert not re.search(r"<script(?! src)|\son\w+=|<style|style=", (folder / "index.html").read_text())


def test_responses_contain_no_secrets(tmp_path: Path, serve: Callable[..., Any]) -> None:
    """Secrets are recognized by value, by key and by shape."""
    run = make_run(tmp_path / "made")
    secret = "hf_secretsecret123"
    with (run / "config.toml").open("a") as out:
        out.write('[log]\nwandb_api_key = "keykeykeykey"\nproxy = "http://me:pa55word@host/x"\n')
    with (run / "events.jsonl").open("a") as out:
        out.write(f'{{"event": "error", "error": "E", "message": "token {secret} refused"}}\n')
    text = (run / "rollouts" / "000005.jsonl").read_text()
    (run / "rollouts" / "000005.jsonl").write_text(text.replace("<script>", f"<script>{secret}"))
    served = serve(run, env={**os.environ, "HF_TOKEN": secret})
    for path in ROUTES:
        body = served.get(path).body.decode()
        for word in (secret, "keykeykeykey", "pa55word"):
            assert word not in body, path
    assert "[hidden]" in served.get("/api/runs/made").body.decode()
    assert "key=" not in Path(f"/proc/{served.process.pid}/cmdline").read_text()


def messages(app: Any, keys: SessionKeys, path: str) -> list[dict[str, Any]]:
    """The messages that the application sends for a request, without a server."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"127.0.0.1:1"), (b"authorization", f"Bearer {keys.token}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(app(scope, None, send))
    return sent


def test_an_exception_gives_a_number_and_no_traceback(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def broken(*_: Any) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("gspo.view.dashboard.handlers.about", broken)

    keys = SessionKeys(print)
    sent = messages(application(Watchlist([run]), keys), keys, "/api/runs/made/about")
    assert sent[0]["status"] == 500
    assert b"secret detail" not in sent[1]["body"]
    assert re.search(rb"error [0-9a-f]{8}", sent[1]["body"])


@pytest.mark.parametrize("body", [b"x" * 100, b"x" * 2_000_000])
def test_a_request_with_a_body_is_refused(served: Any, body: bytes) -> None:
    served.get("/api/runs")
    try:
        response = served.request("/api/runs", method="POST", headers=served.authorization, body=body)
        assert response.status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert served.get("/api/runs").status == 200


def test_many_slow_connections_do_not_block_others(served: Any) -> None:
    """Connections that never finish a request are aborted, and other requests are still served."""
    served.get("/api/runs")
    hanging = []
    for _ in range(450):
        s = socket.create_connection(("127.0.0.1", served.port), timeout=30)
        s.sendall(b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        hanging.append(s)
    assert served.get("/api/runs").status == 200
    started = time.monotonic()
    aborted = 0
    for s in hanging:
        s.settimeout(max(0.1, 25 - (time.monotonic() - started)))
        try:
            aborted += s.recv(100) == b""
        except ConnectionResetError:
            aborted += 1
        s.close()
    assert aborted == len(hanging)
    assert served.get("/api/runs").status == 200


def test_an_interrupt_stops_the_server_cleanly(run: Path, serve: Callable[..., Any]) -> None:
    served = serve(run)
    served.get("/")
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(timeout=10) in (0, 130)


def test_a_port_in_use_gives_a_one_line_error(served: Any, run: Path) -> None:
    command = [sys.executable, "-m", "gspo.cli", "watch", str(run), "--port", str(served.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--port" in done.stderr


@pytest.mark.parametrize("others", ['prefs={"a":1}; ', "foo bar[]=x; ", "a=b=c;;; =; ", 'q="unclosed; '])
def test_cookies_of_other_programs_are_ignored(served: Any, others: str) -> None:
    """Browsers send cookies to all ports of a host."""
    assert served.get("/api/runs", Cookie=others).status == 200


HUGE = "1" + "0" * 400
NESTED = "[" * 900 + "]" * 900
EXTREME_STEPS = ((-5, ""), (1, "-"), (2, ""), (3, "-"), (4, ""), (5, ""), (6, ""))
INVALID_FILES = {
    "config.toml": [
        f"steps = {HUGE}",
        "steps = 0x" + "f" * 9000,
        "steps = " + "9" * 5000,
        f"[objective]\nname = {HUGE}\n[learner]\nmini_batches = {HUGE}",
        "seed = nan\nsteps = inf",
        "a" + ".a" * 300 + " = 1",
        "d = 1979-05-27T07:32:00Z",
        f'name = "{"x" * 900_000}"',
        'objective = "gspo"',
        "steps = 99999999999999999999999",
        "a = " + "[" * 5000,
        'steps = "x"\n[learner]\nmini_batches = "4"',
    ],
    "events.jsonl": [
        f'{{"event": "stop", "step": {HUGE}, "signal": {HUGE}}}\n',
        f'{{"event": {HUGE}, "{"k" * 9000}": [{HUGE}]}}\n',
        '{"event": "alarm", "a": NaN, "b": Infinity}\n',
        '{"event": "x", "a": ' + NESTED + "}\n",
        '{"event": "\\ud800", "n": 99999999999999999999999, "step": 1e300}\n',
        "[" * 200_000 + "\n",
        '{"event": "alarm", "step": "x"}\n',
    ],
    "environment.json": [
        f'{{"device": {HUGE}, "packages": {HUGE}}}',
        '{"a": ' + NESTED + "}",
        "9" * 5000,
        '{"a": "\\ud800", "n": 99999999999999999999999}',
        "[" * 200_000,
    ],
    "metrics.jsonl": [
        f'{{"step": {HUGE}, "reward/mean": {HUGE}}}\n',
        '{"step": 1e400, "eval/accuracy": -1e400}\n',
        '{"step": 1, "eval/accuracy": 1e308, "eval/accuracy_low": -1e308, "eval/accuracy_high": 1e308}\n' * 3,
        "".join(
            f'{{"step": {step}, "reward/mean": {sign}1e308, "grad/norm": {sign}1e308, "length/mean": -1}}\n'
            for step, sign in EXTREME_STEPS
        ),
        '{"step": 1e300, "reward/mean": 1e308}\n',
        '{"eval/accuracy": 0.5, "step": 1}\n' * 3,
        '{"reward/mean": [1]}\n',
        '{"step": "a"}\n',
    ],
    "rollouts/000005.jsonl": [
        '{"sample": 1e300, "reward": 1e300, "token_ids": [1e300, -1]}\n',
        '{"sample": 0, "reward": 1e308, "advantage": -1e308, "sequence_ratio": 1e-320, "parts": {"a": {}}, '
        '"token_ids": [true, 1e18]}\n'
        '{"sample": 0, "reward": 1e308, "advantage": -1e308, "sequence_ratio": 1e-320, "parts": {"a": {}}, '
        '"token_ids": [true, 1e18]}\n',
        "{}\n" * 60_000,
        '{"text": ' + NESTED + "}\n",
        '{"answer": ' + NESTED + ', "columns": [1]}\n',
        '{"answer": {"a": "' + "x" * 300_000 + f'"}}, "columns": {{"b": {2**70}, "c": [1e300, "\\u202e"]}}}}\n',
        '{"answer": 1, "columns": {' + ", ".join(f'"{i}": [[{i}]]' for i in range(10_000)) + "}}\n",
        '{"token_ids": [1], "text": "' + "x" * 300_000 + '"}\n',
    ],
    "timings.jsonl": [
        f'{{"step": 1, "time/step_s": {HUGE}, "time/rollout_s": -1e308}}\n',
        '{"time/rollout_s": 1}\n' * 3,
        '{"step": 1}\n' * 2,
    ],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in INVALID_FILES.items() for text in texts])
def test_a_run_with_invalid_files_is_shown_and_does_not_affect_others(tmp_path: Path, name: str, text: str) -> None:
    for run in ("odd", "good"):
        make_run(tmp_path / run)
    (tmp_path / "odd" / name).write_text(text)
    watchlist = Watchlist([tmp_path / "good", tmp_path / "odd"])
    states = {r["name"]: r["state"] for r in json.loads(handlers.encode(handlers.runs(watchlist)))["runs"]}
    assert states["good"] == "finished"
    assert states["odd"] != "unreadable"
    for response in (
        handlers.overview(watchlist.runs["odd"], {}),
        handlers.about(watchlist.runs["odd"]),
        handlers.step(watchlist.runs["odd"], 5, {}),
        handlers.step(watchlist.runs["odd"], 5, {"order": "ratio"}),
        handlers.completion(watchlist.runs["odd"], 5, 0, 0),
    ):
        assert len(handlers.encode(response)) < 20_000_000
    assert "unreadable" not in page(watchlist)
    output = io.StringIO()
    watch_text([tmp_path / "good", tmp_path / "odd"], Console(file=output, width=120))
    assert "finished, step 12" in output.getvalue()
    assert "unreadable" not in output.getvalue()


def test_an_unreadable_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watchlist = Watchlist([make_run(tmp_path / "good"), make_run(tmp_path / "bad")])

    def broken() -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(watchlist.runs["bad"], "refresh", broken)
    found = {r["name"]: r for r in handlers.runs(watchlist)["runs"]}
    assert found["good"]["state"] == "finished"
    assert found["bad"]["state"] == "unreadable"
    assert "odd" in found["bad"]["why"]


def test_an_unreadable_run_does_not_affect_others_in_the_report_and_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [make_run(tmp_path / "good"), make_run(tmp_path / "bad")]
    findings = RunReader.findings

    def broken(run: RunReader) -> Any:
        if run.path.name == "bad":
            raise RuntimeError("odd")
        return findings(run)

    monkeypatch.setattr(RunReader, "findings", broken)
    assert "This run cannot be read: RuntimeError: odd" in page(Watchlist(paths))
    output = io.StringIO()
    watch_text(paths, Console(file=output, width=120))
    assert "unreadable: RuntimeError: odd" in output.getvalue()
    assert "finished, step 12" in output.getvalue()


PANICKING = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "model": {"type": "WordLevel", "vocab": {" ": 0, "a": 1}, "unk_token": "a"},
    "decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 5},
}
"""A tokenizer that loads, but panics when it decodes a token shorter than what its decoder strips."""


def test_a_tokenizer_that_panics_loses_only_the_token_texts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", completions=[completion("train/1", 0, "x", token_ids=[0, 1, 0])])
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text(json.dumps(PANICKING))
    with pytest.raises(BaseException, match=r"index out of bounds|overflow") as panic:
        Tokenizer.from_str(json.dumps(PANICKING)).decode([0])
    assert not isinstance(panic.value, Exception)
    found = handlers.completion(Watchlist([run]).runs["made"], 5, 0, 0)
    assert found["text"] == "x"
    assert found["pieces"][0] == "\N{REPLACEMENT CHARACTER}"


def test_a_panic_in_a_handler_gives_an_error_response(
    run: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[..., Any]
) -> None:
    def broken(*_: Any) -> None:
        Tokenizer.from_str(json.dumps(PANICKING)).decode([0])

    monkeypatch.setattr("gspo.view.dashboard.handlers.about", broken)
    keys = SessionKeys(print)
    assert messages(application(Watchlist([run]), keys), keys, "/api/runs/made/about")[0]["status"] == 500
