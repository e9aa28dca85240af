"""Rollouts with vLLM: in this process, or on servers.

In: the learner's model, prompts, a `Sampling`. Out: the completions of each prompt in sample order. Invariant: before a
token is sampled, every vLLM holds the current weights of `context.model`. Weights are sent when they have changed. A
digest proves that they arrived and a canary (`gspo/rollout/vllm/canary.py`) that they are in use; otherwise the call
raises `WeightSyncError`.

Each completion is a request with a seed from its own random stream, so it does not depend on the rest of the batch
(except for rounding). Its log-probs are those of the distribution that was sampled from: after `min_tokens`,
temperature, top-k and top-p; 0 for greedy decoding.

vLLM runs without a tokenizer, so it cannot search for text. With stop strings or a thinking budget, a completion is a
sequence of requests. Each continues the tokens so far, with a seed of its own from the completion's random stream,
until the thinking budget or for at most `ROUND` tokens. Between requests the engine searches for stop strings, cuts off
what was sampled after one, and inserts the end of thinking.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from gspo.errors import ConfigError, EngineError
from gspo.model.adapter import adapted
from gspo.model.load import position_limit
from gspo.model.routing import Routers
from gspo.rollout.engine import (
    Controls,
    EngineContext,
    EngineTraits,
    ExtendOptions,
    Extension,
    GenerateOptions,
    Tail,
    check_fits,
    continued,
    controls_for,
    ends_thinking,
    stream_key,
)
from gspo.rollout.vllm.canary import check_canary
from gspo.rollout.vllm.experts import moe_layers
from gspo.rollout.vllm.host import Generate, Host, Request, RequestOutput
from gspo.rollout.vllm.policy import LearnerPolicy
from gspo.types import Completion, Prompt, Routes, Sampling, StopReason

if TYPE_CHECKING:
    from gspo.rollout.vllm.connect import Options

ROUND = 512
"""Tokens per request with stop strings. A completion is sampled for up to as many tokens in vain."""
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


TRAITS = EngineTraits(on_leader=True, extends=True, foreign_code=_foreign_code)


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
        self.policy = LearnerPolicy(context.model, context.ranks)
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

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'vllm' was closed")
        samples, sampling, version = options.samples, options.sampling, options.version
        if not prompts or samples == 0:
            return [[] for _ in prompts]
        check_fits(position_limit(self.context.model), prompts, sampling)
        self._check_room(prompts, sampling)
        self._sync_weights(prompts, sampling, version)
        controls = controls_for(self.context, sampling)
        growing = [
            _Growing(
                prompt=prompts[p],
                sample=sample,
                key=stream_key(options.seed, options.stream, prompts[p].id, sample),
                sampling=sampling.greedy if sampling.greedy_last and sample == samples - 1 else sampling,
                limit=sampling.max_tokens,
            )
            for p in range(len(prompts))
            for sample in range(samples)
        ]
        with_routes = options.routes and self.reports_routes
        self._grow(growing, controls, with_routes)
        completions = self._completions(growing, controls, version, with_routes)
        return [completions[p * samples : (p + 1) * samples] for p in range(len(prompts))]

    def extend(self, extensions: Sequence[Extension], options: ExtendOptions) -> list[list[Completion]]:
        if self.context is None:
            raise RuntimeError("engine 'vllm' was closed")
        groups = [list(extension.completions) for extension in extensions]
        places = [(p, i) for p, group in enumerate(groups) for i, c in enumerate(group) if c.stop is StopReason.CUT]
        if not places:
            return groups
        prompts, sampling, version = [e.prompt for e in extensions], options.sampling, options.version
        check_fits(position_limit(self.context.model), prompts, sampling)
        self._check_room(prompts, sampling)
        self._sync_weights(prompts, sampling, version)
        controls = controls_for(self.context, sampling)
        growing = [self._continued(extensions[p], groups[p][i], sampling, controls, options.seed) for p, i in places]
        with_routes = options.routes and self.reports_routes
        self._grow(growing, controls, with_routes)
        for (p, i), found in zip(places, self._completed(growing, controls, version, with_routes), strict=True):
            groups[p][i] = continued(groups[p][i], *found)
        return groups

    def _continued(
        self, extension: Extension, before: Completion, sampling: Sampling, controls: Controls, seed: int
    ) -> _Growing:
        """A completion that was cut, before its next request."""
        g = _Growing(
            prompt=extension.prompt,
            sample=before.sample,
            key=stream_key(seed, extension.stream, extension.prompt.id, before.sample),
            sampling=sampling,
            limit=min(sampling.max_tokens, len(before.token_ids) + extension.tokens),
            ids=list(before.token_ids),
            logp=[0.0] * len(before.token_ids),
            cut=before.thinking_cut,
        )
        if ends_thinking(controls, before) and not g.cut:
            g.end_thinking(controls.forced_ids)
        return g

    def _grow(self, growing: Sequence[_Growing], controls: Controls, routes: bool) -> None:
        """Sample until every completion is over or cut."""
        assert self.context is not None
        waiting = [g for g in growing if len(g.ids) < g.limit]
        while waiting:
            # Read every time: another thread may send weights meanwhile.
            salt = next(reversed(self._labels), "")
            requests = [g.request(self.context.stop_ids, salt) for g in waiting]
            for g, output in zip(waiting, self.host.generate(requests, routes=routes), strict=True):
                g.add(output)
            waiting = _unfinished(waiting, controls)

    def _completions(
        self, growing: Sequence[_Growing], controls: Controls, version: int, routes: bool
    ) -> list[Completion]:
        assert self.context is not None
        completed = zip(growing, self._completed(growing, controls, version, routes), strict=True)
        return [
            Completion(
                prompt_id=g.prompt.id,
                sample=g.sample,
                version=spans[0][0],
                spans=spans if len(spans) > 1 else (),
                **fields,
            )
            for g, (spans, fields) in completed
        ]

    def _completed(
        self, growing: Sequence[_Growing], controls: Controls, version: int, routes: bool
    ) -> list[tuple[tuple[tuple[int, int], ...], dict[str, Any]]]:
        """The versions of what was sampled, each with its first token, and the fields of each completion."""
        assert self.context is not None
        ends = controls.ends([g.ids for g in growing], [g.cut for g in growing])
        text_B = self.context.texts([g.ids[: end.length] for g, end in zip(growing, ends, strict=True)])
        completed = []
        for g, end, text in zip(growing, ends, text_B, strict=True):
            spans = self._versions([span for span in g.spans if span[1] < end.length], version)
            experts = _routes(self.context.routers, g, end.length) if routes else None
            completed.append((spans, {"text": text, "routes": experts, **controls.fields(g.ids, g.logp, end)}))
        return completed

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

    def end_conversations(self, conversations: Sequence[str]) -> None:
        """Nothing to free: vLLM has a prefix cache of its own."""

    def _sync_weights(self, prompts: Sequence[Prompt], sampling: Sampling, version: int) -> None:
        """Send the learner's weights, unless weights and version are unchanged and every vLLM still holds them."""
        assert self.context is not None
        self._canary = (prompts, sampling)
        now = (self.policy.fingerprint(), version)
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
            check_canary(
                generate,
                self.policy,
                prompts,
                limit=limit,
                temperature=temperature,
                stop_ids=stop_ids,
                label=label,
            )

        self.host.sync(self.policy, label, check)
        self._sent = now

    def _versions(self, spans: Sequence[tuple[str, int]], version: int) -> tuple[tuple[int, int], ...]:
        """The policy versions that sampled a completion, each with its first token."""
        unknown = next((label for label, _ in spans if label not in self._labels), None)
        if unknown is not None:
            raise EngineError(
                f"engine 'vllm': a completion was sampled from weights {unknown!r}, which this run never sent"
            )
        return tuple((self._labels[label], first) for label, first in spans) or ((version, 0),)


@dataclass(kw_only=True)
class _Growing:
    """A completion on its way: what its requests have sampled so far."""

    prompt: Prompt
    sample: int
    key: int
    """Its random stream."""
    sampling: Sampling
    limit: int
    """The number of tokens at which it is cut, or is over."""
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    """One for each token, 0 for those that were inserted."""
    spans: list[tuple[str, int]] = field(default_factory=list)
    experts: bytes | None = b""
    ended: bool = False
    """Whether it has an end token."""
    cut: bool = False
    """Whether the end of its thinking was inserted."""

    def request(self, stop_ids: tuple[int, ...], salt: str) -> Request:
        """The request for the next tokens."""
        s, done = self.sampling, len(self.ids)
        limit = min(self.limit, done + ROUND) if s.stop else self.limit
        if done < s.thinking_budget:
            limit = min(limit, s.thinking_budget)
        return Request(
            prompt_ids=self.prompt.token_ids + tuple(self.ids),
            # vLLM restarts its random numbers with every request.
            seed=stream_key(self.key, "continued", self.prompt.id, done) if done else self.key,
            sampling=replace(s, max_tokens=limit - done, min_tokens=min(max(0, s.min_tokens - done), limit - done)),
            stop_ids=stop_ids,
            salt=salt,
        )

    def add(self, output: RequestOutput) -> None:
        """Append the tokens of the last request."""
        for label, first in output.spans:
            if not self.spans or self.spans[-1][0] != label:
                self.spans.append((label, len(self.ids) + first))
        # The first request that reads a token decides: later ones compute it again, and may round to other experts.
        if self.experts is not None:
            self.experts = None if output.experts is None else self.experts + output.experts[len(self.experts) :]
        self.ids += output.token_ids
        # At temperature 0 the distribution has a single token, whatever vLLM reports.
        self.logp += output.logp if self.sampling.temperature else [0.0] * len(output.token_ids)
        self.ended = output.stopped

    def end_thinking(self, ids: Sequence[int]) -> None:
        """Insert the end of its thinking."""
        self.ids += ids
        self.logp += [0.0] * len(ids)
        self.cut = True
        # One more request reads the inserted tokens: their experts are known then.
        self.limit = max(self.limit, len(self.ids) + 1)


def _unfinished(growing: Sequence[_Growing], controls: Controls) -> list[_Growing]:
    """The completions that need another request. Those that have spent their thinking budget get its end if it is
    missing."""
    sampling = controls.sampling
    tails = [Tail(ids=g.ids, first=max(0, len(g.ids) - ROUND), cut=g.cut) for g in growing]
    stops = controls.stop_indices(tails)
    left = [g for g, stop in zip(growing, stops, strict=True) if stop is None and not g.ended and len(g.ids) < g.limit]
    spent = [g for g in left if sampling.thinking_budget and len(g.ids) == sampling.thinking_budget]
    for g, unclosed in zip(spent, controls.unclosed([g.ids for g in spent]) if spent else (), strict=True):
        if unclosed:
            g.end_thinking(controls.forced_ids)
    return left


def _routes(routers: Routers | None, g: _Growing, length: int) -> Routes:
    """The experts of the prompt and of the first `length` tokens of a completion."""
    assert routers is not None
    tokens = len(g.prompt.token_ids) + len(g.ids) - 1  # no forward reads the last token
    # Two bytes each. Replaying experts of the wrong tokens would raise no error later.
    if g.experts is None or len(g.experts) != 2 * tokens * routers.layers * routers.top_k:
        raise EngineError(
            "engine 'vllm': the experts of a completion are not known for all of its tokens; "
            'set routing.record = false, or sample with engine "local"'
        )
    chosen = torch.frombuffer(bytearray(g.experts), dtype=torch.int16)
    chosen_ILK = chosen.view(tokens, routers.layers, routers.top_k)[: tokens - len(g.ids) + length]
    return routers.pack(chosen_ILK.to(routers.compact))
