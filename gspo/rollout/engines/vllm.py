"""Sampling with vLLM: in this process, or on servers.

In: the learner's model, prompts, a `Sampling`. Out: for each prompt its replies in sample order. Invariant: before a token is
drawn, every vLLM holds the weights that `context.model` has now; they are sent when they have changed, and a digest and a
canary (`gspo/rollout/vllm/canary.py`) prove that they arrived and are in use, or `WeightSyncError` ends the call.

Each reply is a request with a seed of its own stream, so it does not depend on its neighbours (but for rounding). The
log-probabilities are those of the distribution that was drawn from: after temperature, top-k and top-p; 0 when greedy.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gspo.errors import ConfigError, EngineError
from gspo.model.adapter import adapted
from gspo.model.routing import Routers
from gspo.rollout.engine import EngineContext, stream_key
from gspo.rollout.engines.local import check_fits
from gspo.rollout.vllm.canary import check_canary
from gspo.rollout.vllm.experts import moe_layers
from gspo.rollout.vllm.host import Draw, Host, Reply, Request
from gspo.rollout.vllm.weights import changes
from gspo.types import Completion, Prompt, Routes, Sampling, StopReason

if TYPE_CHECKING:
    from gspo.rollout.vllm.connect import Options

REFUSED = "rollout.engine_options.adapters is false"


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
    """`servers`: addresses of servers that run (`gspo serve MODEL`; their token in GSPO_SERVE_TOKEN); `start`: or how many
    to start here; neither: vLLM in this process. `experts`: tell the experts of a mixture's replies (its prefix cache is
    then off). `adapters`: send low-rank adapters as adapters where that can be done, not added to the
    weights. `settings`: more of vLLM's own, for example `{gpu_memory_utilization = 0.4, max_model_len = 4096}`.
    For servers: `transfer`, how weights travel ("auto", "file", "gloo", "nccl"); `in_flight` requests at a time each; seconds for one
    reply (`request_s`), between looks at a busy server (`check_s`), and without any server before giving up (`absent_s`)."""
    from gspo.rollout.vllm import connect
    from gspo.rollout.vllm.in_process import settings_for

    layers = () if context.routers is None else tuple(moe_layers(context.model, context.routers))
    experts = experts and bool(layers)
    for name in settings or {}:
        if name.replace("-", "_") in settings_for(context.model, experts=experts, adapters=adapted(context.model)):
            raise ConfigError(
                f"rollout.engine_options.settings.{name}: is set by gspo, so that vLLM computes what the learner computes; leave it out"
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
    return VllmEngine(context, host, _about(host.adapters, why) if adapted(context.model) else "", room)


def _in_process(context: EngineContext, options: Options, room: int | None) -> VllmEngine:
    """vLLM in this process, and how a low-rank adapter gets there."""
    from gspo.rollout.vllm import adapter
    from gspo.rollout.vllm.in_process import InProcessHost

    model = context.model
    shape: dict[str, Any] = {"experts": options.experts, "layers": options.layers, "settings": options.settings}
    if not adapted(model):
        return VllmEngine(context, InProcessHost(model, **shape), room=room)
    why = adapter.why_merged(model, options.settings) if options.adapters else REFUSED
    host = InProcessHost(model, adapters=not why, **shape)
    return VllmEngine(
        context, host, _about(host.adapters, why or "vLLM has layers of the adapter joined otherwise"), room
    )


def _about(adapters: bool, why: str) -> str:
    if adapters:
        return "the low-rank adapter is sent as an adapter, the model's own weights once"
    return f"the low-rank adapter is added to the model's weights, and all of them are sent for every version: {why}"


class VllmEngine:
    """Draws replies from one or more vLLMs that are kept at the weights of `context.model`."""

    decoded = None

    def __init__(self, context: EngineContext, host: Host, about: str = "", room: int | None = None) -> None:
        self.about = about
        """What a run should say of it when it begins."""
        self.context: EngineContext | None = context
        self.host, self.room = host, room
        self._sent: tuple[str, int] | None = None
        self._canary: tuple[Sequence[Prompt], Sampling] | None = None
        """Prompts to try new weights with."""
        self._name = secrets.token_hex(4)
        """Of this engine: another run on the same server must not use the same labels."""
        self._labels: dict[str, int] = {}
        """Policy version by label of the weights sent. A label is never used again: weights may change within a version."""

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
        check_fits(self.context.model, prompts, sampling)
        self._check_room(prompts, sampling)
        self._bring_weights(prompts, sampling, version)
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
        wanted = routes and self.reports_routes
        replies = self.host.generate(requests, routes=wanted)
        text_B = self.context.tokenizer.batch_decode([r.token_ids for r in replies], skip_special_tokens=True)
        groups: list[list[Completion]] = [[] for _ in prompts]
        for (p, sample), text, request, reply in zip(places, text_B, requests, replies, strict=True):
            spans = self._versions(reply, version)
            groups[p].append(
                Completion(
                    prompt_id=prompts[p].id,
                    sample=sample,
                    token_ids=reply.token_ids,
                    text=text,
                    logp_sampler=reply.logp if request.sampling.temperature else (0.0,) * len(reply.token_ids),
                    stop=StopReason.EOS if reply.ended else StopReason.LENGTH,
                    version=spans[0][0],
                    spans=spans if len(spans) > 1 else (),
                    routes=_routes(self.context.routers, request, reply) if wanted else None,
                )
            )
        return groups

    def _check_room(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """vLLM would cut replies at its own limit, as if they had reached the run's."""
        need = max(len(p.token_ids) for p in prompts) + sampling.max_tokens
        if self.room is not None and need > self.room:
            raise ConfigError(
                f"rollout.engine_options.settings.max_model_len: {self.room} is less than the longest prompt with rollout.max_tokens = {sampling.max_tokens} more; set it to at least {need}"
            )

    def close(self) -> None:
        self.context = None
        self.host.close()

    def sync(self, version: int) -> None:
        """Send the learner's weights now, from another thread than the one that draws replies. On servers these are held
        meanwhile, go on with the new weights, and say so in `spans`; in process the weights wait for the replies."""
        if self._canary is None:
            raise RuntimeError("engine 'vllm': nothing was drawn yet, and the first call sends the weights by itself")
        self._bring_weights(*self._canary, version)

    def _bring_weights(self, prompts: Sequence[Prompt], sampling: Sampling, version: int) -> None:
        """Send the learner's weights, unless neither they nor their version have changed and every vLLM still holds them."""
        assert self.context is not None
        self._canary = (prompts, sampling)
        model, now = self.context.model, (changes(self.context.model), version)
        current = next(reversed(self._labels), None)
        if now == self._sent and current is not None and self.host.label() == current:
            return
        self._sent, label = None, f"{self._name}.{version}.{len(self._labels)}"
        self._labels[label] = version
        stop_ids, limit = self.context.stop_ids, sampling.max_tokens
        temperature = sampling.temperature or 1.0

        def check(draw: Draw) -> None:
            check_canary(draw, model, prompts, limit=limit, temperature=temperature, stop_ids=stop_ids, label=label)

        self.host.sync(model, label, check)
        self._sent = now

    def _versions(self, reply: Reply, version: int) -> tuple[tuple[int, int], ...]:
        """The policy versions that drew a reply, each with its first token."""
        unknown = next((label for label, _ in reply.spans if label not in self._labels), None)
        if unknown is not None:
            raise EngineError(f"engine 'vllm': a reply was drawn by weights {unknown!r}, which this run never sent")
        return tuple((self._labels[label], first) for label, first in reply.spans) or ((version, 0),)


def _routes(routers: Routers | None, request: Request, reply: Reply) -> Routes:
    assert routers is not None
    tokens = len(request.prompt_ids) + len(reply.token_ids) - 1
    if reply.experts is None or len(reply.experts) != 2 * tokens * routers.layers * routers.top_k:
        raise EngineError(
            "engine 'vllm': the experts of a reply are not known for all of its tokens; "
            'set routing.record = false, or sample with engine "local"'
        )
    chosen = torch.frombuffer(bytearray(reply.experts), dtype=torch.int16)
    return routers.pack(chosen.view(tokens, routers.layers, routers.top_k).to(routers.compact))
