"""Engine `vllm` with a real server that it starts itself."""

from __future__ import annotations

import copy
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
from vllm_cases import (
    assert_versions_are_reported,
    context_of,
    differences,
    generate,
    perturb,
    served_tokens,
    small_moe,
    some_prompts,
    wait_until_running,
)

from gspo.rollout.engine import build_engine
from gspo.rollout.vllm.launch_server import TOKEN
from gspo.types import Completion, Sampling

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(small_moe()), {"start": 1, "check_s": 30.0})
    yield built
    built.close()


@pytest.mark.parametrize("way", ["file", "gloo"])
def test_weights_reach_the_server(engine: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.host, "transfer", way)
    prompts, model = some_prompts(), engine.context.model
    for version in (1, 2):
        perturb(model)
        completions = generate(engine, prompts, version=version)
        assert differences(model, prompts, completions).max() < 2e-5
        assert {r.version for r in completions} == {version}


def test_the_servers_experts_match_the_model(engine: Any) -> None:
    """In float32 hardly any token is routed differently. The last token of a sequence has no experts."""
    prompts, model = some_prompts(), engine.context.model
    routers = engine.context.routers
    by_id = {p.id: p for p in prompts}
    same = total = 0
    for completion in generate(engine, prompts, routes=True):
        ids = torch.tensor([by_id[completion.prompt_id].token_ids + completion.token_ids])
        with routers.watch() as trace, torch.no_grad():
            model(ids[:, :-1])
        ours, theirs = trace.used_ILK.sort(-1).values, routers.unpack(completion.routes).sort(-1).values
        assert ours.shape == theirs.shape
        same, total = same + int((ours == theirs).sum()), total + ours.numel()
    assert same > 0.999 * total


def test_completions_report_a_weight_update_during_generation(engine: Any) -> None:
    prompts, model = some_prompts(2), engine.context.model
    assert_versions_are_reported(
        engine, prompts, lambda: copy.deepcopy(model), lambda: perturb(model), version=3, near=2e-5
    )


def test_a_killed_server_is_restarted_and_samples_the_same_completions(engine: Any) -> None:
    prompts = some_prompts()
    settings: dict[str, Any] = {"samples": 8, "sampling": Sampling(max_tokens=200), "version": 5}
    expected = generate(engine, prompts, **settings)
    (server,) = engine.host.servers
    before = served_tokens(engine)
    completions: list[Completion] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=lambda: completions.extend(generate(engine, prompts, **settings)))
        thread.start()
        wait_until_running(engine, thread, before)
        os.killpg(server.process.process.pid, signal.SIGKILL)
        thread.join()
    assert server.restarts == 1
    assert any("is restarted" in str(w.message) for w in caught)
    assert [r.token_ids for r in completions] == [r.token_ids for r in expected]


def test_the_token_is_in_no_command_line_and_no_log(engine: Any) -> None:
    (server,) = engine.host.servers
    token = server.process.token
    lines = [p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if os.access(p, os.R_OK)]
    assert any(b"--worker-extension-cls" in line for line in lines)
    assert not any(token.encode() in line for line in lines)
    assert token not in server.process.log.read_text()
    assert TOKEN not in os.environ
