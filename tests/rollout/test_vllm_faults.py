"""Servers that die, hang, or return invalid responses (F13 to F15 of docs/reliability.md), with a fake server."""

from __future__ import annotations

import base64
import io
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import STOP, FakeVllm
from vllm_cases import small_moe

from gspo.errors import ConfigError, EngineError, WeightSyncError
from gspo.rollout.engine import EngineContext, build_engine
from gspo.rollout.engines.vllm import VllmEngine
from gspo.rollout.vllm import guard, server_host
from gspo.rollout.vllm.host import Request
from gspo.rollout.vllm.http import Client, Fault
from gspo.rollout.vllm.policy import LearnerPolicy
from gspo.rollout.vllm.server_host import TRIES, Limits, Server, ServerHost
from gspo.rollout.vllm.weights import digest, fingerprint, named_weights
from gspo.types import Sampling

QUICK = Limits(request_s=1.5, check_s=0.3, sync_s=2.0, absent_s=2.0)


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeVllm]]:
    made: list[FakeVllm] = []

    def make(**settings: Any) -> FakeVllm:
        made.append(FakeVllm(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def hosted() -> Iterator[Callable[..., ServerHost]]:
    """A host over fake servers, with weights sent."""
    hosts: list[ServerHost] = []

    def host(*fakes: FakeVllm, in_flight: int = 4, limits: Limits = QUICK) -> ServerHost:
        servers = [Server(client=Client(f.address, "token")) for f in fakes]
        made = ServerHost(
            servers, in_flight=in_flight, limits=limits, transfer="file", warn=lambda text: None, experts=False
        )
        hosts.append(made)
        made.sync(LearnerPolicy(model()), "0.0", lambda generate: None)
        return made

    yield host
    for one in hosts:
        one.close()


def model() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def requests(count: int = 12) -> list[Request]:
    sampling = Sampling(max_tokens=6)
    return [Request(prompt_ids=(5, 6, 7), seed=i, sampling=sampling, stop_ids=(STOP,)) for i in range(count)]


def expected(count: int = 12) -> list[tuple[int, ...]]:
    well = FakeVllm()
    bodies = [{"sampling_params": r.settings()} for r in requests(count)]
    well.close()
    return [tuple(well.completion(body)["choices"][0]["token_ids"]) for body in bodies]


FAULTS = [
    "dies",
    "hangs",
    "stopped",
    "half a body",
    "status 500",
    "garbage",
    "no choice",
    "log-prob missing",
    "log-prob NaN",
    "token missing",
    "aborted",
    "other weights",
    "no versions",
    "text for tokens",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_another_server_takes_over_failed_requests(fault: str, fake: Any, hosted: Any) -> None:
    bad, good = fake(fault=fault, after=2), fake()
    host = hosted(bad, good)
    began = time.monotonic()
    outputs = host.generate(requests(), routes=False)
    assert [r.token_ids for r in outputs] == expected(), (
        "each request has its own completion, whichever server sampled it"
    )
    assert time.monotonic() - began < 60
    assert len(bad.asked) + len(good.asked) < 12 * TRIES


@pytest.mark.parametrize("fault", ["hangs", "garbage", "stopped"])
def test_without_another_server_the_call_fails_in_time_with_a_reason(fault: str, fake: Any, hosted: Any) -> None:
    host = hosted(fake(fault=fault, after=2))
    began = time.monotonic()
    with pytest.raises(EngineError, match="engine 'vllm'"):
        host.generate(requests(), routes=False)
    assert time.monotonic() - began < TRIES * (QUICK.request_s + QUICK.absent_s) + 60


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 400
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 2400


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 400, CHUNKED, ENDLESS], ids=["headers", "chunks", "body"]
)
@pytest.mark.parametrize("at_once", [0, 60])
def test_a_call_ends_by_its_deadline_although_bytes_keep_arriving(answer: bytes, at_once: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=trickle, args=(listening, answer, at_once), daemon=True).start()
        client = Client(f"127.0.0.1:{listening.getsockname()[1]}", "token")
        began = time.monotonic()
        with pytest.raises(Fault, match="took too long"):
            client.get("/x", timeout_s=0.6)
        assert 0.5 < time.monotonic() - began < 30, "the whole response takes more than a minute"


def test_a_slow_response_within_its_deadline_is_accepted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=trickle, args=(listening, WHOLE, 20), daemon=True).start()
        assert Client(f"127.0.0.1:{listening.getsockname()[1]}", "token").get("/x", timeout_s=20) == {}


def trickle(listening: socket.socket, answer: bytes, at_once: int) -> None:
    """Respond to one call: the first `at_once` bytes immediately, then a byte at a time."""
    connection, _ = listening.accept()
    with connection, suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(answer[:at_once])
        for i in range(at_once, len(answer)):
            connection.sendall(answer[i : i + 1])
            time.sleep(0.03)


def test_a_server_that_hangs_is_detected_long_before_the_request_deadline(fake: Any, hosted: Any) -> None:
    limits = Limits(request_s=60, check_s=0.3, sync_s=2, absent_s=2)
    host = hosted(fake(fault="stopped", after=2), fake(), limits=limits)
    began = time.monotonic()
    assert len(host.generate(requests(), routes=False)) == 12
    assert time.monotonic() - began < limits.request_s / 2


def test_a_server_that_comes_back_gets_the_weights_before_it_samples(fake: Any, hosted: Any) -> None:
    """Its owner restarted it: it holds weights that this run never sent."""
    one = fake()
    host = hosted(one)
    one.label, one.received = "default", ""
    assert host.label() == "default", "not a label of the run: the engine sends its weights again"
    one.fault, one.after = "status 500", len(one.asked)

    def recover(generate: Any) -> None:
        one.fault = ""

    host._check = recover  # the fake server works again once its weights are back
    outputs = host.generate(requests(3), routes=False)
    assert [r.token_ids for r in outputs] == expected(3)
    assert one.label == "0.0"


def test_an_interrupted_call_leaves_no_requests_behind(fake: Any, hosted: Any) -> None:
    """A signal interrupts a call. Late outputs of its requests must not appear in the next call."""
    one = fake()
    host = hosted(one)
    one.fault, one.after = "hangs", len(one.asked)
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        host.generate(requests(), routes=False)
    one.fault = ""
    assert [r.token_ids for r in host.generate(requests(5), routes=False)] == expected(5)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_refused_requests_are_not_retried(fake: Any, hosted: Any) -> None:
    one, other = fake(fault="status 400"), fake(fault="status 400")
    host = hosted(one, other)
    with pytest.raises(EngineError, match=r"refused \(400\): out of luck"):
        host.generate(requests(1), routes=False)
    assert len(one.asked) + len(other.asked) == 1


def test_weights_of_another_run_on_the_same_server_are_detected(fake: Any, hosted: Any) -> None:
    one = fake()
    host = hosted(one)
    one.label = "another.0.0"
    host.generate(requests(1), routes=False)
    assert one.label == "0.0", "its completions were rejected until it held this run's weights again"
    names = {VllmEngine(EngineContext(model=None, tokenizer=None, stop_ids=()), host)._name for _ in range(8)}  # type: ignore[arg-type]
    assert len(names) == 8, "labels of two engines never collide"


def test_tokens_of_unverified_weights_are_not_used(fake: Any, hosted: Any) -> None:
    one = fake()
    host = hosted(one)

    def wrong(generate: Any) -> None:
        raise WeightSyncError("it does not compute what the learner computes")

    with pytest.raises(WeightSyncError):
        host.sync(LearnerPolicy(model()), "1.1", wrong)
    assert one.label == "1.1", "the server holds them"
    with pytest.raises(WeightSyncError):
        host.generate(requests(1), routes=False)
    assert host.servers[0].labels == {"0.0"}


def test_only_the_calling_thread_reads_the_model(fake: Any, hosted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that comes back during or after a call must not read weights while they are being trained."""
    threads: set[int] = set()
    offer = server_host.Offer

    def recording(*args: Any, **options: Any) -> Any:
        threads.add(threading.get_ident())
        return offer(*args, **options)

    monkeypatch.setattr(server_host, "Offer", recording)
    bad = fake(fault="status 500", after=2)
    host = hosted(bad, fake())
    for _ in range(3):
        host.generate(requests(), routes=False)
    bad.fault = ""
    until = time.monotonic() + 60
    while not host.servers[0].up and time.monotonic() < until:
        host.generate(requests(), routes=False)
    assert host.servers[0].up
    assert threads == {threading.get_ident()}


def test_a_server_that_hangs_does_not_delay_the_weights_of_others(fake: Any, hosted: Any) -> None:
    stuck, good = fake(), fake()
    host = hosted(stuck, good, limits=Limits(request_s=30, check_s=0.3, sync_s=30, absent_s=30))
    stuck.fault, stuck.after, stuck.sync_fault = "stopped", -1, "hangs"
    for version in (1, 2):
        began = time.monotonic()
        host.sync(LearnerPolicy(model()), f"{version}.{version}", lambda generate: None)
        assert len(host.generate(requests(), routes=False)) == 12
        assert time.monotonic() - began < 30


class Failing:
    """A server process that never starts."""

    address, token, log = "127.0.0.1:9", "token", Path("server.log")

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def wait_ready(self, limit_s: float) -> None:
        raise EngineError("a vLLM server did not start")


def test_a_server_that_cannot_be_restarted_is_no_longer_used(fake: Any, hosted: Any) -> None:
    lost, good = fake(), fake()
    host = hosted(lost, good)
    host.servers[0].process = Failing()
    host._down(host.servers[0], "died")
    until = time.monotonic() + 60
    while not host.servers[0].gone and time.monotonic() < until:
        assert len(host.generate(requests(), routes=False)) == 12
    assert host.servers[0].gone
    assert host.servers[0].restarts == server_host.RESTARTS
    host.sync(LearnerPolicy(model()), "1.1", lambda generate: None)
    assert len(host.generate(requests(), routes=False)) == 12


# --- Weights ---


@pytest.mark.parametrize("fault", ["a tensor dropped", "nothing applied"])
@pytest.mark.parametrize("place", [0, 1])
def test_weights_missing_at_one_of_two_servers_fail_the_call(fault: str, place: int, fake: Any, hosted: Any) -> None:
    fakes = [fake(), fake()]
    host = hosted(*fakes)
    fakes[place].sync_fault = fault
    if fault == "nothing applied":
        fakes[place].received = "the digest of what was there before"
    with pytest.raises(WeightSyncError, match=fakes[place].address):
        host.sync(LearnerPolicy(model()), "1.1", lambda generate: None)
    assert not host.servers[place].up


@pytest.mark.parametrize("fault", ["status 500", "dies", "hangs"])
def test_a_server_that_cannot_receive_weights_is_not_used(fault: str, fake: Any, hosted: Any) -> None:
    broken, good = fake(), fake()
    host = hosted(broken, good)
    broken.sync_fault = fault
    host.sync(LearnerPolicy(model()), "1.1", lambda generate: None)
    assert [s.up for s in host.servers] == [False, True]
    before = len(broken.asked)
    assert len(host.generate(requests(), routes=False)) == 12
    assert len(broken.asked) == before
    assert broken.calls.count("/resume") == broken.calls.count("/pause"), "and it is not left paused"


def test_the_weights_file_is_deleted_afterwards(
    fake: Any, hosted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def recording(**options: Any) -> str:
        made.append(make(**{**options, "dir": tmp_path}))
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", recording)
    hosted(fake())
    assert made
    assert not any(Path(folder).exists() for folder in made)


@pytest.mark.parametrize("fused", [True, False])
def test_digest_and_fingerprint_detect_changes(fused: bool) -> None:
    one = model()
    pairs = list(named_weights(one))
    assert digest(pairs) == digest(pairs[::-1])
    swapped = [(n, t.flip(0) if t.dim() == 2 else t) for n, t in pairs]
    assert digest(swapped) != digest(pairs)
    assert digest([(n, t.bfloat16()) for n, t in pairs]) != digest(pairs)
    before = fingerprint(one)
    assert fingerprint(one) == before
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-6, fused=fused)
    one(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert fingerprint(one) != before


def test_tied_weights_are_sent_once() -> None:
    tied = model()
    tied[1].weight = tied[0].weight
    assert [n for n, _ in named_weights(tied)].count("1.weight") == 0


def test_experts_that_vllm_returns_are_reduced_to_the_moe_layers() -> None:
    """Layer 0 of this model is dense, but vLLM's array has a row for it."""
    from gspo.model.routing import find_routers
    from gspo.rollout.vllm.experts import moe_layers, pack_served_experts

    moe = small_moe(num_hidden_layers=3, mlp_only_layers=[0])
    routers = find_routers(moe)
    assert routers is not None
    layers = moe_layers(moe, routers)
    assert layers == [1, 2]
    array = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    file = io.BytesIO()
    np.save(file, array)
    found = np.frombuffer(pack_served_experts(base64.b64encode(file.getvalue()).decode(), layers), dtype=np.int16)
    assert (found.reshape(4, 2, 2) == array[:, 1:]).all()


def test_adapters_are_merged_into_their_base_weights() -> None:
    """In peft's layout: the base weight in `base_layer`, the factors next to it."""
    adapted = torch.nn.Module()
    adapted.base_layer = torch.nn.Linear(4, 3)
    adapted.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
    adapted.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 3, bias=False)})
    adapted.scaling = {"default": 0.5}
    whole = torch.nn.ModuleDict({"q_proj": adapted, "plain": torch.nn.Linear(2, 2)})
    sent = dict(named_weights(whole))
    assert set(sent) == {"q_proj.weight", "q_proj.bias", "plain.weight", "plain.bias"}
    x = torch.randn(5, 4)
    with torch.no_grad():
        expected = adapted.base_layer(x) + 0.5 * adapted.lora_B["default"](adapted.lora_A["default"](x))
        ours = torch.nn.functional.linear(x, sent["q_proj.weight"], sent["q_proj.bias"])
    assert torch.allclose(ours, expected, atol=1e-6)


# --- Access control ---


@pytest.mark.parametrize(("header", "status"), [(b"", 401), (b"Bearer wrong", 401), (b"Bearer right", 200)])
def test_every_path_needs_the_token(header: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setenv(guard.TOKEN, "right")
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    for path in ("/health", "/update_weights", "/v1/completions", "/collective_rpc"):
        scope = {"type": "http", "path": path, "headers": [(b"authorization", header)]}
        asyncio.run(guard.Guard(app)(scope, None, send))
    assert {m["status"] for m in sent if "status" in m} == {status}


def test_a_server_without_a_token_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guard.TOKEN, raising=False)
    with pytest.raises(RuntimeError, match=guard.TOKEN):
        guard.Guard(None)


def test_the_token_is_in_no_command_line() -> None:
    from gspo.rollout.vllm.launch_server import command, environment

    argv = command("model", host="127.0.0.1", port=1, experts=True)
    assert environment("secret-word")[guard.TOKEN] == "secret-word"
    assert "secret-word" not in " ".join(argv)


def test_a_server_starts_in_the_dtype_of_the_model_with_dummy_weights(tmp_path: Path) -> None:
    from gspo.rollout.vllm.launch_server import _defaults

    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    assert _defaults(str(tmp_path), []) == ["--load-format", "dummy", "--dtype", "float32"]
    assert _defaults(str(tmp_path), ["--dtype=bfloat16", "--load-format=auto"]) == []
    assert _defaults("some/hub-name", []) == ["--load-format", "dummy"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vllm_computes_in_the_dtype_of_the_learner(dtype: str) -> None:
    from gspo.rollout.vllm.in_process import settings_for

    model = small_moe(getattr(torch, dtype))
    assert settings_for(model, experts=False, adapters=False)["dtype"] == dtype


# --- Options ---


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"servers": ["127.0.0.1:1"], "start": 1}, "set either start or servers"),
        ({"servers": ["nowhere"]}, "not an address"),
        ({"servers": ["127.0.0.1:1"], "settings": {"seed": 1}}, "has no effect on a running server"),
        ({"start": 1, "transfer": "pigeon"}, "one of auto, file, gloo, nccl"),
        ({"start": 1, "in_flight": 0}, "in_flight: must be a whole number"),
        ({"start": 1, "check_s": 0}, "check_s: must be a positive"),
        ({"servers": ["127.0.0.1:1"]}, "GSPO_SERVE_TOKEN"),
    ],
)
def test_options_that_cannot_work_are_refused(options: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(guard.TOKEN, raising=False)
    with pytest.raises(ConfigError, match=words):
        build_engine("vllm", _context(), options)


@pytest.mark.parametrize("options", [{}, {"start": 1}])
def test_without_vllm_the_error_says_what_to_do(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running servers need no vLLM on this machine."""
    from gspo.rollout.vllm import connect

    monkeypatch.setattr(connect.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="vLLM is not installed here"):
        build_engine("vllm", _context(), options)


def test_an_unreachable_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(guard.TOKEN, "token")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/.*gspo serve MODEL"):
        build_engine("vllm", _context(), {"servers": ["127.0.0.1:9"]})


def _context() -> EngineContext:
    made = model()
    made.dtype, made.device = torch.float32, torch.device("cpu")
    return EngineContext(model=made, tokenizer=None, stop_ids=(STOP,))
