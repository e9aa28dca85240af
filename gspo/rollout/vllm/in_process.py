"""vLLM in the learner's own process: weights are handed over by reference, a low-rank adapter as an adapter.

In: the learner's model, for its shape. Out: a `Host`. Invariant: vLLM starts with weights of no meaning; what it samples with
is only ever what `sync` gave it.
"""

from __future__ import annotations

import base64
import copy
import itertools
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.errors import ConfigError, WeightSyncError
from gspo.model.adapter import layers as adapted_layers
from gspo.rollout.vllm import adapter
from gspo.rollout.vllm.experts import native, sees_itself
from gspo.rollout.vllm.host import Check, Reply, Request
from gspo.rollout.vllm.serve import EXTENSION
from gspo.rollout.vllm.weights import changes, digest, named_weights

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM 0.32's attention on CPUs."""


def settings_for(model: Any, *, experts: bool, adapters: bool) -> dict[str, Any]:
    """What vLLM must be told so that its numbers are the learner's; by the names of its own settings."""
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "load_format": "dummy",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": "gspo"},
        "skip_tokenizer_init": True,
        **_expert_settings(model, experts),
        **(adapter.settings_of(model) if adapters else {}),
    }


def _expert_settings(model: Any, experts: bool) -> dict[str, Any]:
    """vLLM's own way to return experts keeps the prefix cache; ours does not see positions that came from a cache."""
    own = experts and sees_itself(model)
    return {"enable_prefix_caching": own or not experts, "enable_return_routed_experts": own}


def check_cpu(model: Any) -> None:
    """vLLM says this only when the first token is drawn, and in its own words."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in CPU_HEADS:
        raise ConfigError(
            f"rollout.engine: vLLM on a CPU has no attention for heads of size {size}; it has {', '.join(map(str, CPU_HEADS))} (for a built model: model.build_options.head_dim)"
        )


def write_shape(model: Any, folder: Path) -> None:
    """The model's config, which is all that vLLM needs to build it with weights of no meaning."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


class InProcessHost:
    """Owns a `vllm.LLM`."""

    alive = 0

    def __init__(
        self, model: Any, *, experts: bool, layers: Sequence[int], settings: Mapping[str, Any], adapters: bool = False
    ) -> None:
        # Read when vLLM is imported: the engine core in this process, so that tensors go by reference; quiet.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if model.device.type == "cpu":
            check_cpu(model)
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            settings = {"enforce_eager": True, **settings}
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
            raise ConfigError("rollout.engine: 'vllm' in process needs VLLM_ENABLE_V1_MULTIPROCESSING=0; unset it")
        if InProcessHost.alive:
            raise ConfigError(
                "rollout.engine: vLLM's groups are those of its process, so 'vllm' runs in it one at a time; close the other, or use servers"
            )
        import vllm

        self.llm: Any = None
        self.folder = tempfile.TemporaryDirectory(prefix="gspo-vllm-")
        write_shape(model, Path(self.folder.name))
        set_num_threads = torch.set_num_threads
        try:
            self.llm = vllm.LLM(self.folder.name, **settings_for(model, experts=experts, adapters=adapters), **settings)
        finally:
            torch.set_num_threads = set_num_threads  # vLLM's CPU worker puts a refusal in its place
        self.experts, self.layers = experts, layers
        if experts:
            self._rpc("gspo_watch_routes")
        self.adapters = adapters and adapted_layers(model).keys() <= set(
            self._rpc("gspo_adapted", adapter.rank_of(model))
        )
        """Whether adapters travel as adapters; else they are added to the weights."""
        self._numbers = itertools.count(1)
        self._request: Any = None
        """vLLM's name for the adapter that draws."""
        self._base: str | None = None
        """The model's own weights that lie beside it, by `changes`; None: to be sent."""
        self._label: str | None = None
        self._lock = threading.RLock()
        """vLLM's engine is one thread's at a time: weights wait for replies that are being drawn."""
        InProcessHost.alive += 1

    def label(self) -> str | None:
        return self._label

    def sync(self, model: Any, label: str, check: Check) -> None:
        with self._lock:
            self._sync(model, label, check)

    def _sync(self, model: Any, label: str, check: Check) -> None:
        self._label = None
        if self.adapters:
            base, held = changes(model, adapters=False), self._base
            self._base = None
            self._take_out_adapters()
            if base != held:
                self._send(list(named_weights(model, merge=False)), f"{label} without its adapter")
            self._put_in_adapter(model, label)
        else:
            self._send(list(named_weights(model)), label)
        self.llm.reset_prefix_cache()
        check(lambda requests: self.generate(requests, routes=False))
        self._label = label
        if self.adapters:
            self._base = base

    def _take_out_adapters(self) -> None:
        self._request = None
        for number in self.llm.llm_engine.list_loras():
            self.llm.llm_engine.remove_lora(number)

    def _put_in_adapter(self, model: Any, label: str) -> None:
        """vLLM reads it at once; the digest is that of the places that its kernels read from."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        with adapter.written(model) as folder:
            request = LoRARequest(lora_name=label, lora_int_id=number, lora_path=folder)
            self.llm.llm_engine.add_lora(request)
        if self.llm.llm_engine.list_loras() != {number}:
            raise WeightSyncError("engine 'vllm': the learner's adapter is not the only one in vLLM")
        if self._rpc("gspo_adapter", number, adapter.rank_of(model)) != digest(adapter.applied(model)):
            raise WeightSyncError("engine 'vllm': the adapter that arrived in vLLM is not the learner's")
        self._request = request

    def _send(self, pairs: list[tuple[str, Tensor]], label: str) -> None:
        from gspo.rollout.vllm.worker import HANDED

        HANDED[label] = pairs
        try:
            self.llm.start_weight_update()
            self.llm.update_weights({"update_info": {"handed": label}})
            self.llm.finish_weight_update(label)
        finally:
            del HANDED[label]
        received = self._rpc("gspo_received")
        if received != digest(pairs):
            raise WeightSyncError("engine 'vllm': the weights that arrived in vLLM are not the learner's")

    def generate(self, requests: Sequence[Request], *, routes: bool) -> list[Reply]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": list(r.prompt_ids)} for r in requests]
        params = [SamplingParams(**r.settings()) for r in requests]
        with self._lock:
            try:
                done = self.llm.generate(prompts, params, lora_request=self._request, use_tqdm=False)
            except BaseException:
                self._abort()
                raise
            experts = self._experts(done) if routes else [None] * len(done)
        return [_reply(d, e) for d, e in zip(done, experts, strict=True)]

    def close(self) -> None:
        if self.llm is not None:
            with suppress(Exception):
                self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            InProcessHost.alive -= 1
            self.folder.cleanup()

    def _rpc(self, method: str, *args: Any) -> Any:
        """The answer of the first worker."""
        return self.llm.collective_rpc(method, args=args)[0]

    def _abort(self) -> None:
        """Requests that are left behind would be finished, and returned, with the next call's."""
        engine = self.llm.llm_engine
        with suppress(Exception):
            engine.abort_request(list(engine.output_processor.request_states), internal=True)

    def _experts(self, done: Sequence[Any]) -> list[bytes | None]:
        own = [d.outputs[0].routed_experts for d in done]
        if all(array is not None for array in own):
            return [native(array, self.layers) for array in own]
        texts = self._rpc("gspo_take_routes", [d.request_id for d in done])
        self._rpc("gspo_forget_routes")
        return [None if text is None else base64.b64decode(text) for text in texts]


def _reply(done: Any, experts: bytes | None) -> Reply:
    """Weights are known by the label they were sent under; an adapter by its name, which is its label."""
    output, request = done.outputs[0], done.lora_request
    spans = tuple((span.version, span.start) for span in output.weight_versions or ())
    return Reply(
        token_ids=tuple(output.token_ids),
        logp=tuple(next(iter(at.values())).logprob for at in output.logprobs),
        ended=output.finish_reason == "stop",
        spans=spans if request is None else ((request.lora_name, 0),),
        experts=experts,
    )
