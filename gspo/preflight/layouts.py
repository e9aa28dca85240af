"""Layouts of a run: how many GPUs share the model, and what each of them computes and keeps.

In: settings, a model without weights, a kind of GPU and how many there are. Out: a `LayoutPlan` for every layout, the
fastest that fits first, and what is not available, with the reason. Invariant: a layout consists of settings that the
program has; nothing is planned that it cannot do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gspo.config import Config
from gspo.preflight.gpus import Gpu
from gspo.preflight.machine import human
from gspo.preflight.memory import Estimate, cheaper_optimizers, estimate, optimizer_settings
from gspo.preflight.model_size import shape_of
from gspo.preflight.speed import StepTime, step_time, useful_operations
from gspo.preflight.workload import Workload

USABLE = 0.92
"""Share of a GPU's memory that a plan uses. The rest is for the CUDA context and for fragmentation."""
MOST_CONTEXT = 8
"""More ranks per group than a node has GPUs would exchange tokens over the network in every layer."""
UNTESTED = "several ranks on GPUs were never tried: they need GSPO_UNTESTED_NCCL=1 (docs/scale.md)"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The GPUs to plan for."""

    gpu: Gpu
    gpus: int
    """Of all nodes."""
    nodes: int = 1

    @property
    def per_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """Memory and time of a layout."""

    workload: Workload
    need: Estimate
    time: StepTime
    gpu: Gpu

    @property
    def usable(self) -> float:
        return USABLE * self.gpu.memory

    @property
    def fits(self) -> bool:
        return self.need.peak <= self.usable

    @property
    def obstacle(self) -> str:
        """Why it does not fit; empty if it does."""
        if self.fits:
            return ""
        return f"{self.need.worst} needs {human(self.need.peak)}, and {human(self.usable)} are usable"

    @property
    def name(self) -> str:
        model, learner = self.workload.config.model, self.workload.config.learner
        way = f"LoRA {model.lora.rank}" if model.lora.rank else "full"
        way = f"Q{way}" if model.quantize else way
        more = f" x CP {learner.context_parallel}" if learner.context_parallel > 1 else ""
        extras = {
            "checkpointing": model.gradient_checkpointing,
            "8-bit AdamW": learner.optimizer == "adamw_8bit",
            "offload": learner.optimizer_offload,
        }
        named = "".join(f", {extra}" for extra, used in extras.items() if used)
        return f"{self.workload.ranks} GPU{'s' * (self.workload.ranks > 1)}{more}, {way}{named}"

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens that are sampled and trained on, of all GPUs."""
        return self.workload.completions * self.workload.completion_tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Useful operations of the training phase, as a share of the peak."""
        peak = self.workload.ranks * self.gpu.flops
        return useful_operations(self.workload) / self.time.phases["training"] / peak

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the layout, as in a recipe."""
        model, learner = self.workload.config.model, self.workload.config.learner
        found: dict[str, Any] = {
            "model.dtype": model.dtype,
            "model.gradient_checkpointing": model.gradient_checkpointing,
            "learner.mini_batches": learner.mini_batches,
            "learner.micro_batch_tokens": learner.micro_batch_tokens,
            "rollout.prompts": self.workload.config.rollout.prompts,
            "rollout.group_size": self.workload.config.rollout.group_size,
            "rollout.max_tokens": self.workload.config.rollout.max_tokens,
        }
        if model.lora.rank:
            found["model.lora.rank"] = model.lora.rank
        if model.quantize:
            found["model.quantize"] = model.quantize
        if learner.context_parallel > 1:
            found["learner.context_parallel"] = learner.context_parallel
        return found | optimizer_settings(learner)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan for."""

    config: Config
    cluster: Cluster
    prompt_tokens: int
    completion_tokens: float
    kl: bool
    lora_rank: int
    """Of the layouts with adapters."""


def plan_layouts(request: Request, skeleton: Callable[[Config], Any]) -> list[LayoutPlan]:
    """Every layout, those that fit first, the fastest of them first."""
    plans = []
    for config, model, ranks in _variants(request, skeleton):
        plan = _plan(request, config, model, ranks)
        plans.append(plan)
        # Adapters have little optimizer state.
        if not plan.fits and not config.model.lora.rank:
            plans += [_plan(request, other.config, model, ranks) for other in cheaper_optimizers(plan.workload)]
    return sorted(plans, key=lambda plan: (not plan.fits, plan.time.total if plan.fits else plan.need.peak))


def _variants(request: Request, skeleton: Callable[[Config], Any]) -> Iterator[tuple[Config, Any, int]]:
    """Settings, model and ranks of every layout."""
    base = request.config
    ways: list[tuple[int, Literal["", "nf4"]]] = [(0, ""), (request.lora_rank, ""), (request.lora_rank, "nf4")]
    for lora_rank, quantize in ways:
        model_config = replace(base.model, quantize=quantize, lora=replace(base.model.lora, rank=lora_rank))
        if quantize and base.model.dtype == "float32":
            continue
        model = skeleton(replace(base, model=model_config))
        for checkpointing in (False, True):
            for ranks in rank_counts(request.cluster.gpus):
                for context in context_sizes(ranks, shape_of(model).heads):
                    yield (
                        replace(
                            base,
                            model=replace(model_config, gradient_checkpointing=checkpointing),
                            learner=replace(base.learner, context_parallel=context),
                        ),
                        model,
                        ranks,
                    )


def rank_counts(gpus: int) -> list[int]:
    """All GPUs, and the powers of two below."""
    return sorted({gpus, *(2**i for i in range(gpus.bit_length()) if 2**i <= gpus)})


def context_sizes(ranks: int, heads: int) -> list[int]:
    """Ranks that can compute a micro-batch together."""
    return [c for c in (1, 2, 4, MOST_CONTEXT) if ranks % c == 0 and heads % c == 0 and c <= ranks]


def _plan(request: Request, config: Config, model: Any, ranks: int) -> LayoutPlan:
    """A layout, with the largest micro-batches up to the given size that fit; the smallest if none fits."""
    longest = request.prompt_tokens + config.rollout.max_tokens
    tokens = config.learner.micro_batch_tokens
    while True:
        workload = Workload(
            config=replace(config, learner=replace(config.learner, micro_batch_tokens=tokens)),
            skeleton=model,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.completion_tokens,
            kl=request.kl,
            gpu=True,
            packed=True,
            ranks=ranks,
            memory=USABLE * request.cluster.gpu.memory,
        )
        need = estimate(workload)
        smaller = need.worst == "training" and tokens // 2 >= longest
        if need.peak <= USABLE * request.cluster.gpu.memory or not smaller:
            time = step_time(workload, request.cluster.gpu, per_node=request.cluster.per_node)
            return LayoutPlan(workload=workload, need=need, time=time, gpu=request.cluster.gpu)
        tokens //= 2


def not_available(model: Any, cluster: Cluster) -> list[tuple[str, str]]:
    """What the program does not offer, and why: layouts that other systems have."""
    found = [
        ("engines with weights of their own (vLLM)", "not planned: neither their memory nor their speed is modeled"),
    ]
    if shape_of(model).experts:
        found.append(
            (
                "expert parallelism",
                "refused by transformers 5.19 with token dispatch, and wrong without an error in one layout of 5.22",
            )
        )
    if cluster.gpus > 1:
        found += [
            ("tensor and pipeline parallelism", "not implemented"),
            ("offload and 8-bit AdamW on several ranks", "work in a single process only (docs/scale.md)"),
            (
                'ranks.sampling_weights = "layers"',
                "not planned: never tried on GPUs, where it decodes without CUDA graphs. For weights that exceed a GPU",
            ),
        ]
    return found


def shared_limits(plans: Sequence[LayoutPlan]) -> str:
    """What keeps a model from any layout; empty if one fits."""
    if not plans or plans[0].fits:
        return ""
    size = min(plan.workload.weights.bytes for plan in plans)
    usable = plans[0].usable
    if size > usable:
        return (
            f"The weights alone take {human(size)}, and every GPU must hold all of them while it samples: "
            f"{human(usable)} are usable."
        )
    return f"The smallest layout needs {human(min(plan.need.peak for plan in plans))} of {human(usable)}."
