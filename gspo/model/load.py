"""The model and its tokenizer: loaded, or built small from a config.

In: `ModelConfig`. Out: a `Policy`. Invariant: no forward has dropout or other noise, so the learner's probabilities
are the sampler's. Weights are aligned in memory, so that a resumed run rounds as an uninterrupted one does. No code
from the model's repository runs unless `model.trust_remote_code` is set. Several ranks read a model in parts
(`partial.py`), and all of them must call these functions.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from gspo.config import ModelConfig, RoutingConfig
from gspo.errors import ConfigError, panics_as_errors
from gspo.model import adapter
from gspo.model.causal import check_causal
from gspo.model.compiled_layers import request_compilation
from gspo.model.gradient_checkpointing import recompute_activations
from gspo.model.kernels.rms_norm import replace_norms
from gspo.model.lm_head import lm_head
from gspo.model.loading_progress import counted_loading
from gspo.model.memory_alignment import align
from gspo.model.packed_forward import supports_packing
from gspo.model.partial import Parts
from gspo.model.quantization import quantize
from gspo.model.routing import Routers, check_balance, check_replay, find_routers, says_it_routes
from gspo.model.sharding import sharded_like
from gspo.model.source import load_errors, resolve_model_source, shape_dir
from gspo.ranks.group import ONE, Ranks

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
TINY_PARAMETERS = 5_000_000
"""Below this number of parameters, threads cost more than they gain."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A causal language model with its tokenizer."""

    model: Any
    tokenizer: Any
    device: torch.device
    routers: Routers | None = None
    """None for a dense model, or if routing is not recorded."""

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion: those of the model's generation config and of the tokenizer."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ids = configured if isinstance(configured, list | tuple) else [configured]
        return tuple(sorted({i for i in (*ids, self.tokenizer.eos_token_id) if i is not None}))

    @cached_property
    def end_id(self) -> int:
        """The token that ends a demonstration."""
        own = self.tokenizer.eos_token_id
        return self.stop_ids[0] if own is None else own

    @cached_property
    def position_limit(self) -> int | None:
        """The longest sequence that the model supports; None if unknown."""
        return position_limit(self.model)

    @cached_property
    def pad_id(self) -> int:
        """The padding on the right of shorter rows. No real token attends to it."""
        return next(i for i in (self.tokenizer.pad_token_id, *self.stop_ids, 0) if i is not None)


def position_limit(model: Any) -> int | None:
    """The longest sequence for which a token's logits do not depend on the rest of the batch."""
    config = model.config.get_text_config(decoder=True)
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    # longrope switches all frequencies, also those of keys in the cache, once any row exceeds the original length.
    if limit is not None and rope.get("rope_type") == "longrope":
        return min(limit, rope.get("original_max_position_embeddings") or limit)
    return limit


def load_tokenizer(config: ModelConfig, *, alphabet: str = "") -> Any:
    """The model's tokenizer; for a built model, a tokenizer of the characters of `alphabet` (default: ASCII)."""
    shape = shape_dir(config)
    if config.build and not (shape and (shape / "tokenizer_config.json").is_file()):
        return char_tokenizer(alphabet or "".join(map(chr, range(32, 127))) + "\n")
    from transformers import AutoTokenizer

    path, options = (str(shape), {}) if shape else resolve_model_source(config)
    # An adapter may come with a tokenizer of its own.
    if adapter.base_of(config.path) and (Path(config.path).expanduser() / "tokenizer_config.json").is_file():
        path, options = os.path.expanduser(config.path), {}
    with load_errors(config), _tokenizer_errors(Path(path)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code, **options)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ConfigError(
            f"model.path: {path}: its tokenizer has no tokens; its files ({', '.join(TOKENIZER_FILES)}) are missing: "
            "download them again"
        )
    return tokenizer


@contextmanager
def _tokenizer_errors(folder: Path) -> Iterator[None]:
    """Name the damaged file in the errors of the tokenizer libraries, which raise any exception and even panic."""
    try:
        with panics_as_errors():
            yield
    except ImportError:
        raise
    except Exception as error:
        broken = next((name for name in TOKENIZER_FILES if _broken_json(folder / name)), None)
        if broken is None and isinstance(error, OSError | ValueError):
            raise
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise ValueError(
            f"{broken or ' or '.join(TOKENIZER_FILES)} is damaged ({reason:.200}); download the tokenizer's files again"
        ) from error


def _broken_json(file: Path) -> bool:
    try:
        return file.is_file() and not isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except (ValueError, RecursionError):
        return True


def _check_vocabulary(model: Any, tokenizer: Any, config: ModelConfig) -> None:
    """Refuse a tokenizer with more tokens than embeddings: the run would fail at the first prompt with such a token."""
    known = model.get_input_embeddings().weight.shape[0]
    # Not `!=`: embeddings are often padded to a multiple of 64 or 128.
    if tokenizer.vocab_size > known:
        raise ConfigError(
            f"model.path: {config.path}: its tokenizer has {tokenizer.vocab_size} tokens, and the model embeds "
            f"{known}: they do not belong together; download the tokenizer's files again"
        )


def _check_float16(model: Any, config: ModelConfig) -> None:
    """Refuse weights that float16 does not hold: they have become infinite, and every log-prob would be NaN."""
    weights = (named for named in model.named_parameters() if named[1].dtype == torch.float16)
    name = next((name for name, weight in weights if not bool(torch.isfinite(weight).all())), None)
    if name is not None:
        raise ConfigError(
            f'model.dtype: {config.path or config.build}: {name} has a weight that is not finite in "float16", whose '
            'largest number is 65504; set model.dtype = "bfloat16" or "float32"'
        )


def load_policy(
    config: ModelConfig, tokenizer: Any, *, seed: int, routing: RoutingConfig | None = None, ranks: Ranks = ONE
) -> Policy:
    """Load or build the model on its device, without noise; with `routing`, also find its routers.

    The caller shards it over several `ranks`."""
    device = device_of(config.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # kernels, events and CUDA graphs use the current device
    model = _load(config, tokenizer, device, seed, ranks).to(device)
    _check_float16(model, config)
    _check_vocabulary(model, tokenizer, config)
    # The rounding of a one-row product on a CPU depends on the alignment of the weight: docs/log.md, "one bit per
    # resume".
    align(model)
    _prepare(model, config)
    # After `_prepare`: dropout would make two forward passes differ.
    check_causal(model)
    _choose_threads(model, config, device)
    if device.type == "cpu":
        replace_norms(model)
    # Both run a trial once per model and remember its result: now, so that their warnings come before the first step.
    lm_head(model)
    supports_packing(model)
    request_compilation(model, config.compile)
    policy = Policy(model=model, tokenizer=tokenizer, device=device, routers=_routers(model, routing))
    if not policy.stop_ids:
        raise ConfigError(
            f"{config.path}: neither the model nor its tokenizer has an end token; set eos_token in the tokenizer's "
            "config"
        )
    return policy


@torch.no_grad()
def reload_weights(policy: Policy, config: ModelConfig, ranks: Ranks = ONE) -> None:
    """Replace the policy's trained weights by those that a run has saved of the same model at `config.path`.

    In place: an engine, an optimizer and CUDA graphs that share the tensors stay valid. The weights are read to the
    CPU, so a GPU needs no room for a second model."""
    if adapter.adapted(policy.model):
        adapter.reload_weights(policy.model, Path(config.path))
        return
    # Through transformers, because the names in the file may differ from those in memory.
    parts = Parts(ranks, torch.device("cpu"))
    saved = _load_plain(config, parts if ranks.several else None).state_dict(keep_vars=True)
    for name, tensor in policy.model.state_dict().items():
        tensor.copy_(sharded_like(parts.tensor(saved[name]), tensor))


def has_weights(policy: Policy, config: ModelConfig) -> bool:
    """Whether the policy's trained weights are bitwise those that a run has saved of the same model at `config.path`.
    For a model that is not sharded."""
    if adapter.adapted(policy.model):
        return adapter.has_weights(policy.model, Path(config.path))
    saved = _load_plain(config).state_dict()
    return all(torch.equal(saved[name], tensor.cpu()) for name, tensor in policy.model.state_dict().items())


def _routers(model: Any, config: RoutingConfig | None) -> Routers | None:
    """The model's routers, if routing is recorded. Settings that need routers are an error if there are none."""
    if config is None or not config.record:
        return None
    routers = find_routers(model)
    for key in ("replay", "balance_loss"):
        if routers is None and getattr(config, key) not in ("off", 0.0):
            what = (
                "is a mixture of experts, but no router that selects by top-k was found in it"
                if says_it_routes(model)
                else "is a dense model: it has no routers"
            )
            raise ConfigError(f"routing.{key}: {type(model).__name__} {what}; remove routing.{key}")
    if routers is not None and config.replay != "off":
        check_replay(model, routers)
    if routers is not None and config.balance_loss:
        check_balance(model, routers)
    return routers


def device_of(name: str) -> torch.device:
    """The device that a setting names, if this machine has it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"model.device: {name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"model.device: {name} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"model.device: {name} is set, but this machine has no usable GPU; use auto or cpu")
    if device.type == "cuda" and device.index is None and (local := os.environ.get("LOCAL_RANK", "")).isdecimal():
        # Of several ranks on a machine, each has a GPU of its own. Some launchers let each see that one alone.
        return torch.device("cuda", int(local) % torch.cuda.device_count())
    return device


def dtype_name(config: ModelConfig) -> Literal["float32", "bfloat16", "float16"]:
    """The precision of the weights. `auto` is float16 on a GPU: half the memory of float32 and about its gain, where
    bfloat16 rounds more coarsely than sequence-level clip ranges are wide (benchmarks/RESULTS.md). CPUs compute float16
    slowly."""
    if config.dtype != "auto":
        return config.dtype
    return "float16" if device_of(config.device).type == "cuda" else "float32"


def _load(config: ModelConfig, tokenizer: Any, device: torch.device, seed: int, ranks: Ranks) -> Any:
    adapter_quantize = adapter.quantization_of(config.path)
    if adapter_quantize and config.lora.rank and config.quantize != adapter_quantize:
        raise ConfigError(
            f"model.quantize: the adapter in {config.path} was trained with 4-bit weights; set model.quantize = "
            f'"{adapter_quantize}", or merge it first: gspo save --merge'
        )
    parts = Parts(ranks, device) if ranks.several and _readable_in_parts(config) else None
    # A model of real size is initialized where it fits. The tiny ones are the same on every device.
    with device if shape_dir(config) else nullcontext():
        model = build_model(config, tokenizer, seed) if config.build else _load_plain(config, parts)
    # An adapter that is merged below belongs to the quantized weights, not to the original ones.
    if config.quantize or adapter_quantize:
        _check_float16(model, config)  # 4-bit weights would hide it
        quantize(model, device)
    model = _with_adapters(model, config, seed)
    if parts is not None:
        parts.own(model)
    return model


def _readable_in_parts(config: ModelConfig) -> bool:
    """Whether a rank can read a part of each weight. Quantizing, merging an adapter and initializing need all of it."""
    merged = adapter.base_of(config.path) is not None and not config.lora.rank
    quantized = config.quantize or adapter.quantization_of(config.path)
    return not (config.build or merged or quantized or resolve_model_source(config)[1])


def _load_plain(config: ModelConfig, parts: Parts | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    path, options = resolve_model_source(config)
    if options:
        from transformers import GgufConfig

        # The learner needs weights that it can train.
        options["quantization_config"] = GgufConfig(dequantize=True)
    gguf = "gguf_file" in options
    with load_errors(config), counted_loading(gguf), parts.reading() if parts else nullcontext():
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype_name(config)), trust_remote_code=config.trust_remote_code, **options
        )


def _with_adapters(model: Any, config: ModelConfig, seed: int) -> Any:
    """Attach the saved adapter, or merge it if `model.lora.rank` is 0. Without one, attach a fresh adapter if
    requested."""
    base = adapter.base_of(config.path)
    if base is not None:
        with load_errors(config):
            saved = adapter.attach_saved(model, Path(config.path).expanduser())
        if config.lora.targets and set(config.lora.targets) != set(saved.targets):
            raise ConfigError(
                f"model.lora.targets: the adapter in {config.path} has {', '.join(saved.targets)}, and training "
                "continues with these; remove it"
            )
        if not config.lora.rank:
            adapter.merge(model)
        elif config.lora.experts != saved.experts:
            raise ConfigError(
                f"model.lora.experts: the adapter in {config.path} has {'adapters' if saved.experts else 'none'} for "
                f"experts, and training continues with that; set it to {str(saved.experts).lower()}"
            )
        for key in ("rank", "alpha"):
            given, known = getattr(config.lora, key), getattr(saved, key)
            if given and given != known:
                raise ConfigError(
                    f"model.lora.{key}: the adapter in {config.path} has {known:g}, and training continues with that; "
                    f"set it to {known:g}"
                )
    elif config.lora.rank:
        place = shape_dir(config) or Path(config.path).expanduser()
        # An absolute path, so that the adapter finds its base model from any working directory.
        adapter.attach(model, config.lora, base=str(place.absolute()) if place.exists() else config.path, seed=seed)
    return model


def build_model(config: ModelConfig, tokenizer: Any, seed: int) -> Any:
    """Build a model from scratch, with weights initialized from the seed: a small one, or one of the shape that a
    `config.json` describes."""
    from transformers import AutoModelForCausalLM

    shape = _shape(config, tokenizer)
    # The run's own random state must not depend on the size of the model.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape, dtype=getattr(torch, dtype_name(config)))


def _shape(config: ModelConfig, tokenizer: Any) -> Any:
    """The transformers config of a model that is built from scratch."""
    from transformers import AutoConfig

    tokens = {key: getattr(tokenizer, key) for key in ("eos_token_id", "pad_token_id", "bos_token_id")}
    folder = shape_dir(config)
    if folder:
        with load_errors(replace(config, path=str(folder))):
            shape = AutoConfig.from_pretrained(folder)
        _check_options(config, set(shape.to_dict()), shape.model_type)
        for option, value in config.build_options.items():
            setattr(shape, option, value)
        if not (folder / "tokenizer_config.json").is_file():
            # The ids in the file are those of a tokenizer that is not there.
            shape.update(tokens)
        return shape
    size: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "max_position_embeddings": 4096,
    }
    kind = "qwen3"
    if config.build == "tiny_moe":
        kind = "qwen3_moe"
        size |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    _check_options(config, {*AutoConfig.for_model(kind).to_dict(), *size}, kind)
    # The character tokenizer adds no token before a prompt.
    fixed = tokens | {"bos_token_id": None, "vocab_size": len(tokenizer)}
    return AutoConfig.for_model(kind, **(fixed | size | dict(config.build_options)))


def _check_options(config: ModelConfig, known: set[str], kind: str) -> None:
    """Refuse options that the model does not have, or that its tokenizer decides."""
    known -= {"vocab_size", "eos_token_id", "pad_token_id", "bos_token_id"}
    for option in config.build_options:
        if option not in known:
            hint = difflib.get_close_matches(option, known, n=1)
            raise ConfigError(
                f"model.build_options.{option}: {kind} has no such size{f'; did you mean {hint[0]}?' if hint else ''}"
            )


def char_tokenizer(alphabet: str) -> Any:
    """A tokenizer with one token per character and a small chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<end>", "<user>", "<assistant>", "<unknown>"]
    vocabulary = {symbol: i for i, symbol in enumerate(special + sorted(set(alphabet)))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    # Not ".", which does not match a line break.
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unknown>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=template,
        # The cleanup would remove spaces before punctuation, so that decoding would not return the text that was
        # encoded.
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def _prepare(model: Any, config: ModelConfig) -> None:
    """Disable dropout and router noise, apply gradient checkpointing, and make the model savable."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "router_jitter_noise", "jitter_noise"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.eval()
    if config.gradient_checkpointing:
        recompute_activations(model)
    _make_generation_config_savable(model)


def _make_generation_config_savable(model: Any) -> None:
    """Repair a generation config that transformers loads but refuses to save: the first checkpoint would fail."""
    from transformers import GenerationConfig

    given = model.generation_config
    for do_sample in (given.do_sample, True):  # a config with a temperature or top_p but no do_sample means sampling
        given.do_sample = do_sample
        try:
            return given.validate(strict=True)
        except ValueError as error:
            reason = str(error).splitlines()[0]
    warnings.warn(
        f"generation_config.json: transformers refuses to save it ({reason}); checkpoints keep only its token ids",
        RuntimeWarning,
        stacklevel=2,
    )
    kept = {key: getattr(given, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**kept)


def _choose_threads(model: Any, config: ModelConfig, device: torch.device) -> None:
    tiny = device.type == "cpu" and sum(p.numel() for p in model.parameters()) < TINY_PARAMETERS
    # Setting the number explicitly stops MKL from changing it at run time, which would change how sums are split and
    # rounded.
    torch.set_num_threads(config.threads or (1 if tiny else torch.get_num_threads()))
