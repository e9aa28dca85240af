"""Rollouts with vLLM: in this process, or on servers.

In: the learner's model, prompts, a `Sampling`. Out: the completions of each prompt in sample order. Invariant: before a
token is sampled, every vLLM holds the current weights of `context.model`. Weights are sent when they have changed. A
digest proves that they arrived and a canary (`gspo/rollout/vllm/canary.py`) that they are in use; otherwise the call
raises `WeightSyncError`.

Each completion is a request with a seed from its own random stream, so it does not depend on the rest of the batch
(except for rounding). Its log-probs are those of the distribution that was sampled from: after temperature, top-k and
top-p; 0 for greedy decoding.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gspo.errors import ConfigError, EngineError
from gspo.model.adapter import adapted
from gspo.model.load import position_limit
from gspo.model.routing import Routers
from gspo.rollout.engine import EngineContext, EngineTraits, check_fits, stream_key
from gspo.rollout.vllm.canary import check_canary
from gspo.rollout.vllm.experts import moe_layers
from gspo.rollout.vllm.host import Generate, Host, Request, RequestOutput
from gspo.rollout.vllm.weights import fingerprint
from gspo.types import Completion, Prompt, Routes, Sampling, StopReason

if TYPE_CHECKING:
    from gspo.rollout.vllm.connect import Options

REFUSED = "rollout.engine_options.adapters is false"


def _foreign_code(options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """vLLM settings, which may name classes to import, and servers that receive this user's token."""
    found = []
    if options.get("settings"):
        given = json.dumps(options["settings"], sort_keys=True, default=str)
        found.append((f"rollout.engine_options.settings gives vLLM {given}", f"vLLM {given}"))
    if options.get("servers"):
        given = ", ".join(map(str, options["servers"]))
        found.append((f"rollout.engine_options.servers sends GSPO_SERVE_TOKEN to {given}", f"servers {given}"))
    return found


TRAITS = EngineTraits(foreign_code=_foreign_code)


def build(
    context: EngineContext,
    *,
    servers: Sequence[str] = (),
    start: int = 0,
    experts: bool = True,
    adapters: bool = True,
    settings: Mapping[str, Any] | None = None,
    transfer: str = "auto",
    in_flight: int = 64,
    request_s: float = 600.0,
    check_s: float = 5.0,
    absent_s: float = 300.0,
) -> VllmEngine:
    """Build the engine.

    `servers`: addresses of running servers (`gspo serve MODEL`; their token in GSPO_SERVE_TOKEN). `start`: number of
    servers to start on this machine. Without either, vLLM runs in this process. `experts`: report the experts of an MoE
    model's completions (this disables the prefix cache on a CPU). `adapters`: send LoRA adapters as adapters where
    possible, instead of merged into the weights. `settings`: further settings of vLLM, for example
    `{gpu_memory_utilization = 0.4, max_model_len = 4096}`. For servers: `transfer`, how weights are sent ("auto",
    "file", "gloo", "nccl"); `in_flight`, concurrent requests per server; `request_s`, seconds for one completion;
    `check_s`, seconds between health checks of a busy server; `absent_s`, seconds without any working server before
    the run stops."""
    from gspo.rollout.vllm import connect
    from gspo.rollout.vllm.in_process import settings_for

    layers = () if context.routers is None else tuple(moe_layers(context.model, context.routers))
    experts = experts and bool(layers)
    for name in settings or {}:
        if name.replace("-", "_") in settings_for(context.model, experts=experts, adapters=adapted(context.model)):
            raise ConfigError(
                f"rollout.engine_options.settings.{name}: is set by gspo, so that vLLM computes what the learner "
                "computes; remove it"
            )
    served = connect.Options(
        servers=tuple(servers),
        start=start,
        experts=experts,
        layers=layers,
        adapters=adapters and adapted(context.model),
        settings=dict(settings or {}),
        transfer=transfer,
        in_flight=in_flight,
        request_s=request_s,
        check_s=check_s,
        absent_s=absent_s,
    )
    connect.check(served)
    room = served.settings.get("max_model_len", served.settings.get("max-model-len"))
    if not servers and not start:
        return _in_process(context, served, room)
    host = connect.connect(context.model, served)
    why = "not all servers have room for it (docs/engines.md)" if adapters else REFUSED
    return VllmEngine(context, host, _describe_adapter(host.adapters, why) if adapted(context.model) else "", room)


def _in_process(context: EngineContext, options: Options, room: int | None) -> VllmEngine:
    """vLLM in this process. A LoRA adapter is sent as an adapter if vLLM supports it, else merged."""
    from gspo.rollout.vllm import adapter
    from gspo.rollout.vllm.in_process import InProcessHost

    model = context.model
    shape: dict[str, Any] = {"experts": options.experts, "layers": options.layers, "settings": options.settings}
    if not adapted(model):
        return VllmEngine(context, InProcessHost(model, **shape), room=room)
    why = adapter.obstacle_to_adapter(model, options.settings) if options.adapters else REFUSED
    host = InProcessHost(model, adapters=not why, **shape)
    return VllmEngine(
        context, host, _describe_adapter(host.adapters, why or "vLLM fuses layers of the adapter differently"), room
    )


def _describe_adapter(adapters: bool, why: str) -> str:
    if adapters:
        return "the LoRA adapter is sent as an adapter, the base weights only once"
    return f"the LoRA adapter is merged into the weights, and all weights are sent for every version: {why}"


class VllmEngine:
    """Samples completions from one or more vLLM instances, which it keeps in sync with `context.model`."""

    decoded = None

    def __init__(self, context: EngineContext, host: Host, about: str = "", room: int | None = None) -> None:
        self.about = about
        """A sentence for the log at the start of a run."""
        self.context: EngineContext | None = context
        self.host = host
        self.room = room
        self._sent: tuple[str, int] | None = None
        self._canary: tuple[Sequence[Prompt], Sampling] | None = None
        """Prompts and settings to test new weights with."""
        self._name = secrets.token_hex(4)
        """Prefix of this engine's labels: another run on the same server must not use the same labels."""
        self._labels: dict[str, int] = {}
        """Policy version by label of the weights sent. A label is never reused: weights may change within a version."""

    @property
    def reports_routes(self) -> bool:
        return self.context is not None and self.context.routers is not None and self.host.experts

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        stream: str,
        version: int,
        routes: bool = False,
    ) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'vllm' was closed")
        if not prompts or samples == 0:
            return [[] for _ in prompts]
        check_fits(position_limit(self.context.model), prompts, sampling)
        self._check_room(prompts, sampling)
        self._sync_weights(prompts, sampling, version)
        places = [(p, sample) for p in range(len(prompts)) for sample in range(samples)]
        requests = [
            Request(
                prompt_ids=prompts[p].token_ids,
                seed=stream_key(seed, stream, prompts[p].id, sample),
                sampling=sampling.greedy if sampling.greedy_last and sample == samples - 1 else sampling,
                stop_ids=self.context.stop_ids,
            )
            for p, sample in places
        ]
        with_routes = routes and self.reports_routes
        outputs = self.host.generate(requests, routes=with_routes)
        text_B = self.context.texts([o.token_ids for o in outputs])
        groups: list[list[Completion]] = [[] for _ in prompts]
        for (p, sample), text, request, output in zip(places, text_B, requests, outputs, strict=True):
            spans = self._versions(output, version)
            groups[p].append(
                Completion(
                    prompt_id=prompts[p].id,
                    sample=sample,
                    token_ids=output.token_ids,
                    text=text,
                    # At temperature 0 the distribution has a single token, whatever vLLM reports.
                    logp_sampler=output.logp if request.sampling.temperature else (0.0,) * len(output.token_ids),
                    stop=StopReason.EOS if output.stopped else StopReason.LENGTH,
                    version=spans[0][0],
                    spans=spans if len(spans) > 1 else (),
                    routes=_routes(self.context.routers, request, output) if with_routes else None,
                )
            )
        return groups

    def _check_room(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Raise if vLLM's own limit is too small: vLLM would truncate completions as if they had reached the run's."""
        need = max(len(p.token_ids) for p in prompts) + sampling.max_tokens
        if self.room is not None and need > self.room:
            raise ConfigError(
                f"rollout.engine_options.settings.max_model_len: {self.room} is less than the longest prompt plus "
                f"rollout.max_tokens = {sampling.max_tokens}; set it to at least {need}"
            )

    def close(self) -> None:
        self.context = None
        self.host.close()

    def sync(self, version: int) -> None:
        """Send the learner's weights now, from another thread than the one that generates.

        Servers pause running requests, continue them with the new weights and report the change in `spans`. In process,
        the update waits until running requests have finished."""
        # Before the first call of `generate` there is no completion to continue, and no prompt to test weights with.
        if self._canary is not None:
            self._sync_weights(*self._canary, version)

    def _sync_weights(self, prompts: Sequence[Prompt], sampling: Sampling, version: int) -> None:
        """Send the learner's weights, unless weights and version are unchanged and every vLLM still holds them."""
        assert self.context is not None
        self._canary = (prompts, sampling)
        model = self.context.model
        now = (fingerprint(model), version)
        current = next(reversed(self._labels), None)
        if now == self._sent and current is not None and self.host.label() == current:
            return
        self._sent = None  # if the update fails, the next call sends the weights again
        label = f"{self._name}.{version}.{len(self._labels)}"
        self._labels[label] = version
        stop_ids = self.context.stop_ids
        limit = sampling.max_tokens
        # Greedy decoding has no temperature to test.
        temperature = sampling.temperature or 1.0

        def check(generate: Generate) -> None:
            check_canary(generate, model, prompts, limit=limit, temperature=temperature, stop_ids=stop_ids, label=label)

        self.host.sync(model, label, check)
        self._sent = now

    def _versions(self, output: RequestOutput, version: int) -> tuple[tuple[int, int], ...]:
        """The policy versions that sampled a completion, each with its first token."""
        unknown = next((label for label, _ in output.spans if label not in self._labels), None)
        if unknown is not None:
            raise EngineError(
                f"engine 'vllm': a completion was sampled from weights {unknown!r}, which this run never sent"
            )
        return tuple((self._labels[label], first) for label, first in output.spans) or ((version, 0),)


def _routes(routers: Routers | None, request: Request, output: RequestOutput) -> Routes:
    assert routers is not None
    tokens = len(request.prompt_ids) + len(output.token_ids) - 1  # no forward reads the last token
    # Two bytes each. Replaying experts of the wrong tokens would raise no error later.
    if output.experts is None or len(output.experts) != 2 * tokens * routers.layers * routers.top_k:
        raise EngineError(
            "engine 'vllm': the experts of a completion are not known for all of its tokens; "
            'set routing.record = false, or sample with engine "local"'
        )
    chosen = torch.frombuffer(bytearray(output.experts), dtype=torch.int16)
    return routers.pack(chosen.view(tokens, routers.layers, routers.top_k).to(routers.compact))
