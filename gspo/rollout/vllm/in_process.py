"""vLLM in the learner's own process: weights are passed by reference, a LoRA adapter as an adapter.

In: the learner's policy. Out: a `Host`. Invariant: vLLM starts with dummy weights and samples only with
weights that `sync` gave it.
"""

from __future__ import annotations

import base64
import copy
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from gspo.errors import ConfigError, WeightSyncError
from gspo.model.adapter import layers as adapted_layers
from gspo.model.sharding import module_class
from gspo.rollout.vllm import adapter
from gspo.rollout.vllm.experts import pack_experts, vllm_returns_experts
from gspo.rollout.vllm.host import Check, Request, RequestOutput
from gspo.rollout.vllm.launch_server import EXTENSION
from gspo.rollout.vllm.policy import LearnerPolicy, Pairs
from gspo.rollout.vllm.weights import Part, digest

_KEPT: list[Any] = []
"""What was closed without a shutdown."""
CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that the CPU attention of vLLM 0.32 supports."""


def settings_for(model: Any, *, experts: bool, adapters: bool) -> dict[str, Any]:
    """The vLLM settings that make its results match the learner's."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "load_format": "dummy",
        # After temperature, top-p and top-k: the distribution that the token was sampled from.
        "logprobs_mode": "processed_logprobs",
        # Otherwise vLLM would apply the sampling defaults of the model's generation_config.json.
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": "gspo"},
        # Prompts are token ids, and the folder with the model's shape has no tokenizer.
        "skip_tokenizer_init": True,
        **_expert_settings(model, experts),
        **(adapter.lora_settings(model) if adapters else {}),
    }


def _expert_settings(model: Any, experts: bool) -> dict[str, Any]:
    """vLLM's own recording of experts works with its prefix cache; ours misses positions that come from the cache."""
    own = experts and vllm_returns_experts(model)
    return {"enable_prefix_caching": own or not experts, "enable_return_routed_experts": own}


def check_cpu(model: Any) -> None:
    """Refuse head sizes without CPU attention. vLLM itself fails only at the first token, with an obscure message."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in CPU_HEADS:
        raise ConfigError(
            f"rollout.engine: vLLM on a CPU has no attention for heads of size {size}; it supports "
            f"{', '.join(map(str, CPU_HEADS))} (for a built model: set model.build_options.head_dim)"
        )


def write_shape(model: Any, folder: Path) -> None:
    """Write the model's config, which is all that vLLM needs to build the model with dummy weights."""
    config = copy.deepcopy(model.config)
    # A model that was built from a config does not name its class.
    config.architectures = [module_class(model).__name__]
    config.save_pretrained(folder)


class InProcessHost:
    """Owns a `vllm.LLM`."""

    alive = 0

    def __init__(
        self, model: Any, *, experts: bool, layers: Sequence[int], settings: Mapping[str, Any], adapters: bool = False
    ) -> None:
        # vLLM reads these when it is imported. The engine core must be in this process, so that tensors can be passed
        # by reference.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if model.device.type == "cpu":
            check_cpu(model)
            # Otherwise vLLM pins threads to cores and reserves more main memory; the learner shares both.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            settings = {"enforce_eager": True, **settings}
        # The user may have set it, and vLLM would then start its engine in another process.
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
            raise ConfigError("rollout.engine: 'vllm' in process needs VLLM_ENABLE_V1_MULTIPROCESSING=0; unset it")
        if InProcessHost.alive:
            raise ConfigError(
                "rollout.engine: vLLM's process groups are global, so 'vllm' engines in a process run one at a time; "
                "close the other, or set rollout.engine_options.start"
            )
        import vllm

        self.llm: Any = None
        self.folder = tempfile.TemporaryDirectory(prefix="gspo-vllm-")
        write_shape(model, Path(self.folder.name))
        set_num_threads = torch.set_num_threads
        own = settings_for(model, experts=experts, adapters=adapters)
        self._with_ranks = torch.distributed.is_initialized()
        """Whether this process has process groups that are not vLLM's."""
        try:
            with _own_process_groups() if self._with_ranks else nullcontext():
                self.llm = vllm.LLM(self.folder.name, **own, **settings)
        finally:
            torch.set_num_threads = set_num_threads  # vLLM's CPU worker replaces it with a function that raises
        self.experts = experts
        self.layers = layers
        if experts:
            self._rpc("gspo_watch_routes")
        self.adapters = adapters and adapted_layers(model).keys() <= set(
            self._rpc("gspo_adapted", adapter.lora_rank(model))
        )
        """Whether adapters are sent as adapters; otherwise they are merged into the weights."""
        self._numbers = itertools.count(1)
        self._request: Any = None
        """The `LoRARequest` of the current adapter."""
        self._base: str | None = None
        """The `fingerprint` of the base weights that vLLM holds; None if they must be sent."""
        self._label: str | None = None
        self._lock = threading.RLock()
        """vLLM's engine is not thread-safe: a weight update waits for running requests."""
        InProcessHost.alive += 1

    def label(self) -> str | None:
        return self._label

    def sync(self, policy: LearnerPolicy, label: str, check: Check) -> None:
        with self._lock:
            self._sync(policy, label, check)

    def _sync(self, policy: LearnerPolicy, label: str, check: Check) -> None:
        self._label = None
        if self.adapters:
            base = policy.fingerprint(adapters=False)
            held = self._base
            self._base = None  # if the update fails, the next one sends the base weights again
            self._unload_adapters()
            if base != held:
                self._send(policy, Part.BASE, f"{label} without its adapter")
            self._load_adapter(policy, label)
        else:
            self._send(policy, Part.MERGED, label)
        self.llm.reset_prefix_cache()  # cached keys and values belong to the old weights
        check(lambda requests: self.generate(requests, routes=False))
        self._label = label
        if self.adapters:
            self._base = base

    def _unload_adapters(self) -> None:
        self._request = None
        for number in self.llm.llm_engine.list_loras():
            self.llm.llm_engine.remove_lora(number)

    def _load_adapter(self, policy: LearnerPolicy, label: str) -> None:
        """Load the adapter. The digest is taken from the buffers that vLLM's kernels read."""
        from vllm.lora.request import LoRARequest

        model, weights = policy.model, policy.adapter()
        number = next(self._numbers)
        with adapter.temporary_folder(model, weights) as folder:
            request = LoRARequest(lora_name=label, lora_int_id=number, lora_path=folder)
            self.llm.llm_engine.add_lora(request)
        if self.llm.llm_engine.list_loras() != {number}:
            raise WeightSyncError("engine 'vllm': the learner's adapter is not the only one in vLLM")
        if self._rpc("gspo_adapter", number, adapter.lora_rank(model)) != digest(
            adapter.kernel_weights(model, weights)
        ):
            raise WeightSyncError("engine 'vllm': the adapter that arrived in vLLM differs from the learner's")
        self._request = request

    def _send(self, policy: LearnerPolicy, part: Part, label: str) -> None:
        from gspo.rollout.vllm.worker import OFFERED

        def hand(pairs: Pairs) -> None:
            OFFERED[label] = pairs
            try:
                self.llm.start_weight_update()
                self.llm.update_weights({"update_info": {"handed": label}})
                self.llm.finish_weight_update(label)
            finally:
                del OFFERED[label]

        sent = policy.send(part, hand)
        if self._rpc("gspo_received") != sent:
            raise WeightSyncError("engine 'vllm': the weights that arrived in vLLM differ from the learner's")

    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[RequestOutput]:
        from vllm import SamplingParams

        prompts = [
            {"prompt_token_ids": list(r.prompt_ids), **({"cache_salt": r.salt} if r.salt else {})} for r in requests
        ]
        params = [SamplingParams(**r.settings()) for r in requests]
        with self._lock:
            try:
                outputs = self.llm.generate(prompts, params, lora_request=self._request, use_tqdm=False)
            except BaseException:
                self._abort()
                raise
            experts = self._experts(outputs) if routes else [None] * len(outputs)
        return [_convert(o, e) for o, e in zip(outputs, experts, strict=True)]

    def close(self) -> None:
        if self.llm is not None:
            if self._with_ranks:
                # vLLM would destroy the process groups of the ranks with its own. This process ends with the run.
                _KEPT.append(self.llm)
            else:
                with suppress(Exception):
                    self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            InProcessHost.alive -= 1
            self.folder.cleanup()

    def _rpc(self, method: str, *args: Any) -> Any:
        """The result of the first worker."""
        return self.llm.collective_rpc(method, args=args)[0]

    def _abort(self) -> None:
        """Abort all requests. Otherwise vLLM would finish them and return them with those of the next call."""
        engine = self.llm.llm_engine
        with suppress(Exception):
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _experts(self, outputs: Sequence[Any]) -> list[bytes | None]:
        arrays = [o.outputs[0].routed_experts for o in outputs]
        if all(array is not None for array in arrays):
            return [pack_experts(array, self.layers) for array in arrays]
        texts = self._rpc("gspo_take_routes", [o.request_id for o in outputs])
        self._rpc("gspo_forget_routes")
        return [None if text is None else base64.b64decode(text) for text in texts]


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Inside, `torch.distributed` does not know the process groups of the ranks. vLLM then makes its own, of this
    process alone, instead of waiting for the other ranks."""
    # Torch has no public way to have a second world. `make test-vllm` runs this.
    from torch.distributed import distributed_c10d

    ranks = distributed_c10d._world
    distributed_c10d._world = distributed_c10d._World()
    try:
        yield
    finally:
        distributed_c10d._world = ranks


def _convert(done: Any, experts: bytes | None) -> RequestOutput:
    """From vLLM's output. vLLM reports weights by their label, and an adapter by its name, which is its label."""
    output = done.outputs[0]
    request = done.lora_request
    spans = tuple((span.version, span.start) for span in output.weight_versions or ())
    return RequestOutput(
        token_ids=tuple(output.token_ids),
        logp=tuple(next(iter(at.values())).logprob for at in output.logprobs),
        stopped=output.finish_reason == "stop",
        spans=spans if request is None else ((request.lora_name, 0),),
        experts=experts,
    )
