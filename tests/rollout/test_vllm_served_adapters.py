"""Engine `vllm` with a real server, for a policy with LoRA adapters: after the first sync only the adapter is sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from needs import needs_vllm
from test_vllm_adapters import NEAR, assert_follows, perturb_adapter, small_dense, with_adapter
from vllm_cases import assert_versions_are_reported, context_of, differences, generate, perturb, some_prompts

from gspo.errors import WeightSyncError
from gspo.rollout.engine import build_engine
from gspo.rollout.vllm import transfer
from gspo.rollout.vllm.guard import TOKEN

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(with_adapter(small_dense())), {"start": 1, "check_s": 30.0})
    yield built
    built.close()


@pytest.fixture
def weights_sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels under which base or merged weights are sent to a server."""
    sent: list[str] = []
    send = transfer._send_weights

    def recording(offer: Any, client: Any, label: str, *more: Any) -> None:
        sent.append(label)
        send(offer, client, label, *more)

    monkeypatch.setattr(transfer, "_send_weights", recording)
    return sent


def test_the_base_weights_are_sent_once_and_then_only_the_adapter(engine: Any, weights_sent: list[str]) -> None:
    assert engine.about.startswith("the LoRA adapter is sent as an adapter")
    assert_follows(engine, versions=4)
    assert len(weights_sent) == 1


def test_running_requests_continue_with_the_new_adapter_and_report_it(engine: Any, weights_sent: list[str]) -> None:
    prompts, model = some_prompts(2), engine.context.model
    generate(engine, prompts, version=10)
    assert_versions_are_reported(
        engine,
        prompts,
        lambda: copy.deepcopy(model),
        lambda: perturb_adapter(model, 0.03),
        version=10,
        near=NEAR,
    )
    assert len(weights_sent) == 0


def test_an_adapter_that_was_not_loaded_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = engine.context.model, some_prompts()
    generate(engine, prompts)
    perturb_adapter(model)
    (server,) = engine.host.servers
    workers = server.client.workers
    with monkeypatch.context() as patched:
        patched.setattr(
            server.client,
            "workers",
            lambda method, *a, **kw: ["None"] if method == "gspo_put_adapter" else workers(method, *a, **kw),
        )
        with pytest.raises(WeightSyncError, match="adapter that arrived"):
            generate(engine, prompts)
    assert differences(model, prompts, generate(engine, prompts)).max() < NEAR


def test_a_server_that_an_earlier_run_has_used(
    engine: Any, weights_sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds another model's weights, and an adapter of the same name."""
    generate(engine, some_prompts())
    (server,), model = engine.host.servers, small_dense()
    perturb(model)
    perturb_adapter(with_adapter(model))
    monkeypatch.setenv(TOKEN, server.process.token)
    later = build_engine("vllm", context_of(model), {"servers": [server.client.address]})
    try:
        assert later.about.startswith("the LoRA adapter is sent as an adapter")
        assert_follows(later, versions=2)
        assert len(weights_sent) == 1
    finally:
        later.close()


def test_a_server_without_room_gets_merged_weights(
    engine: Any, weights_sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,), model = engine.host.servers, with_adapter(small_dense(), rank=12)
    monkeypatch.setenv(TOKEN, server.process.token)
    later = build_engine("vllm", context_of(model), {"servers": [server.client.address]})
    try:
        assert "not all servers have room" in later.about
        assert_follows(later, versions=2)
        assert len(weights_sent) == 2
    finally:
        later.close()
