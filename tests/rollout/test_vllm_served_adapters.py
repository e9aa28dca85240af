"""Engine `vllm` with a real server, for a policy with low-rank adapters: after the first time the adapter alone is sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from needs import needs_vllm
from test_vllm_adapters import NEAR, adapted, followed, small_dense, trained
from vllm_cases import apart, assert_told_apart, context_of, drawn, some_prompts, stirred

from gspo.errors import WeightSyncError
from gspo.rollout.engine import build_engine
from gspo.rollout.vllm import transfer
from gspo.rollout.vllm.guard import TOKEN

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    needs_vllm()
    built = build_engine("vllm", context_of(adapted(small_dense())), {"start": 1, "check_s": 5.0})
    yield built
    built.close()


@pytest.fixture
def weights_sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels under which whole weights go to a server."""
    sent: list[str] = []
    send = transfer._send_weights

    def watched(offer: Any, client: Any, label: str, *more: Any) -> None:
        sent.append(label)
        send(offer, client, label, *more)

    monkeypatch.setattr(transfer, "_send_weights", watched)
    return sent


def test_the_models_own_weights_travel_once_and_then_the_adapter_alone(engine: Any, weights_sent: list[str]) -> None:
    assert engine.about.startswith("the low-rank adapter is sent as an adapter")
    followed(engine, versions=4)
    assert len(weights_sent) == 1


def test_replies_under_way_go_on_with_the_new_adapter_and_say_so(engine: Any, weights_sent: list[str]) -> None:
    prompts, model = some_prompts(2), engine.context.model
    drawn(engine, prompts, version=10)
    assert_told_apart(engine, prompts, copy.deepcopy(model), lambda: trained(model, 0.03), versions=(10, 11), near=NEAR)
    assert len(weights_sent) == 0


def test_an_adapter_that_was_not_put_in_is_an_error(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = engine.context.model, some_prompts()
    drawn(engine, prompts)
    trained(model)
    (server,) = engine.host.servers
    workers = server.client.workers
    with monkeypatch.context() as patched:
        patched.setattr(
            server.client,
            "workers",
            lambda method, *a, **kw: ["None"] if method == "gspo_put_adapter" else workers(method, *a, **kw),
        )
        with pytest.raises(WeightSyncError, match="adapter that arrived"):
            drawn(engine, prompts)
    assert apart(model, prompts, drawn(engine, prompts)).max() < NEAR


def test_a_server_that_an_earlier_run_has_used(
    engine: Any, weights_sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has another model's weights, and an adapter of the same name."""
    drawn(engine, some_prompts())
    (server,), model = engine.host.servers, small_dense()
    stirred(model)
    trained(adapted(model))
    monkeypatch.setenv(TOKEN, server.process.token)
    later = build_engine("vllm", context_of(model), {"servers": [server.client.address]})
    try:
        assert later.about.startswith("the low-rank adapter is sent as an adapter")
        followed(later, versions=2)
        assert len(weights_sent) == 1
    finally:
        later.close()


def test_a_server_without_room_gets_whole_weights(
    engine: Any, weights_sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (server,), model = engine.host.servers, adapted(small_dense(), rank=12)
    monkeypatch.setenv(TOKEN, server.process.token)
    later = build_engine("vllm", context_of(model), {"servers": [server.client.address]})
    try:
        assert "not all servers have room" in later.about
        followed(later, versions=2)
        assert len(weights_sent) == 2
    finally:
        later.close()
