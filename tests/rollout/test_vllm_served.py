"""Engine `vllm` with a real server that it starts itself."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_vllm
from vllm_cases import apart, assert_told_apart, context_of, drawn, small_moe, some_prompts, stirred

from gspo.rollout.engine import build_engine
from gspo.rollout.vllm.serve import TOKEN
from gspo.types import Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(small_moe()), {"start": 1, "check_s": 2.0})
    yield built
    built.close()


@pytest.mark.parametrize("way", ["file", "gloo"])
def test_weights_reach_the_server(engine: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.host, "transfer", way)
    prompts, model = some_prompts(), engine.context.model
    for version in (1, 2):
        stirred(model)
        replies = drawn(engine, prompts, version=version)
        assert apart(model, prompts, replies).max() < 2e-5
        assert {r.version for r in replies} == {version}


def test_the_servers_experts_are_the_models(engine: Any) -> None:
    """In float32 hardly a token is routed differently; the last of a sequence is not asked."""
    prompts, model = some_prompts(), engine.context.model
    routers, by_id = engine.context.routers, {p.id: p for p in prompts}
    same = total = 0
    for reply in drawn(engine, prompts, routes=True):
        ids = torch.tensor([by_id[reply.prompt_id].token_ids + reply.token_ids])
        with routers.watch() as seen, torch.no_grad():
            model(ids[:, :-1])
        ours, theirs = seen.used_ILK.sort(-1).values, routers.unpack(reply.routes).sort(-1).values
        assert ours.shape == theirs.shape
        same, total = same + int((ours == theirs).sum()), total + ours.numel()
    assert same > 0.999 * total


def test_weights_that_change_under_way_are_told_apart(engine: Any) -> None:
    prompts, model, old = some_prompts(2), engine.context.model, small_moe()
    drawn(engine, prompts, version=3)
    old.load_state_dict(model.state_dict())
    assert_told_apart(engine, prompts, old, lambda: stirred(model), versions=(3, 4), near=2e-5)


def test_a_server_that_is_killed_is_started_anew_and_draws_the_same(engine: Any) -> None:
    prompts = some_prompts()
    settings: dict[str, Any] = {"samples": 8, "sampling": Sampling(max_tokens=200), "version": 5}
    expected = drawn(engine, prompts, **settings)
    (server,) = engine.host.servers
    threading.Timer(0.3, os.killpg, (server.process.process.pid, signal.SIGKILL)).start()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replies = drawn(engine, prompts, **settings)
    assert server.restarts == 1
    assert any("is started anew" in str(w.message) for w in told)
    assert [r.token_ids for r in replies] == [r.token_ids for r in expected]


def test_the_token_is_not_to_be_seen(engine: Any) -> None:
    (server,) = engine.host.servers
    token = server.process.token
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if os.access(p, os.R_OK)]
    assert any(b"--worker-extension-cls" in line for line in lines)
    assert not any(token.encode() in line for line in lines)
    assert token not in server.process.log.read_text()
    assert TOKEN not in os.environ
