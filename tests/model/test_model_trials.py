"""Requirements on a model, checked by running it: causal, deterministic, and savable."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from gspo.config import Config, ModelConfig
from gspo.errors import ConfigError
from gspo.learner.forward import plan_logprobs
from gspo.learner.plan import make_plan
from gspo.model.lm_head import supports_logits_to_keep
from gspo.model.load import Policy, char_tokenizer, load_policy, load_tokenizer
from gspo.model.micro_batch import TokenSequence
from gspo.trainer import train

SMALL = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DROPS = {
    "seed_oss": {"residual_dropout": 0.5, "attention_dropout": 0.5},
    "opt": {"ffn_dim": 48, "dropout": 0.5, "word_embed_proj_dim": 32, "layerdrop": 0.5},
    "xglm": {
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "dropout": 0.5,
        "activation_dropout": 0.5,
    },
    "biogpt": {"hidden_dropout_prob": 0.5, "activation_dropout": 0.5},
    "bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "dropout": 0.5,
        "activation_dropout": 0.5,
        "decoder_layerdrop": 0.5,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
}
"""Families with dropout as a module, as a function, or of whole layers."""


def saved(folder: Path, kind: str, **fields: Any) -> ModelConfig:
    """A small model of a family, as a user would give it."""
    known = AutoConfig.for_model(kind)
    shape = AutoConfig.for_model(kind, **{k: v for k, v in SMALL.items() if k in known.to_dict()} | fields)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    char_tokenizer("sort 0123456789").save_pretrained(folder)
    return ModelConfig(path=str(folder), device="cpu")


def loaded(config: ModelConfig, **fields: Any) -> Policy:
    config = ModelConfig(**{**vars(config), **fields})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_policy(config, load_tokenizer(config), seed=0)


def logprobs_and_gradient(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [
        TokenSequence(prompt_ids=(5, 6, 7), completion_ids=(8, 9, 1)),
        TokenSequence(prompt_ids=(5, 6), completion_ids=(11, 12, 13, 1)),
    ]
    plan = make_plan(rows, range(2), mini_batches=1, token_budget=100, pad_id=0, seed="", packed=False)
    micro = plan.updates[0][0]
    logits = model(input_ids=micro.input_ids, use_cache=False).logits.flatten(0, 1)[micro.output_N]
    logp_N = logits.log_softmax(-1).gather(-1, micro.target_N[:, None])[:, 0]
    trained = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(logp_N.sum(), trained, allow_unused=True)
    return logp_N.detach(), torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("kind", DROPS)
def test_gradient_checkpointing_does_not_change_results(kind: str, tmp_path: Path) -> None:
    config = saved(tmp_path, kind, **DROPS[kind])
    plain, recomputed = loaded(config).model, loaded(config, gradient_checkpointing=True).model
    stored: list[int] = []

    def forward_and_count(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = logprobs_and_gradient(model)
        stored.append(count)
        return found

    expected, gradient = forward_and_count(plain)
    for _ in range(2):
        found = forward_and_count(recomputed)
        assert torch.equal(found[0], expected)
        torch.testing.assert_close(found[1], gradient, rtol=1e-5, atol=1e-6)
    assert stored[1] < stored[0]  # checkpointing does save memory


def test_a_model_without_gradient_checkpointing_is_refused(tmp_path: Path) -> None:
    config = saved(tmp_path, "xlnet", d_model=32, n_layer=2, n_head=4, d_inner=48)
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: XLNetLMHeadModel does not support it"):
        loaded(config, gradient_checkpointing=True)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra"])
def test_an_encoder_is_refused_and_its_decoder_is_not(kind: str, tmp_path: Path) -> None:
    config = saved(tmp_path, kind)
    with pytest.raises(ConfigError, match="is not a causal language model: later tokens change"):
        loaded(config)
    assert loaded(saved(tmp_path / "decoder", kind, is_decoder=True)).stop_ids


def test_a_forward_with_noise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    plain = modeling_qwen3.Qwen3MLP.forward
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", lambda self, x: torch.nn.functional.dropout(plain(self, x)))
    with pytest.raises(ConfigError, match="other probabilities for the same tokens"):
        loaded(saved(tmp_path, "qwen3"))


def ignores(forward: Callable[..., Any]) -> Callable[..., Any]:
    def swallowed(self: Any, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return swallowed


def first_instead(forward: Callable[..., Any]) -> Callable[..., Any]:
    def first(self: Any, *args: Any, logits_to_keep: int = 0, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = output.logits[:, :logits_to_keep] if logits_to_keep else output.logits
        return output

    return first


def does_not_know(forward: Callable[..., Any]) -> Callable[..., Any]:
    def strict(self: Any, input_ids: Any = None, use_cache: bool = False, position_ids: Any = None) -> Any:
        return forward(self, input_ids=input_ids, use_cache=use_cache, position_ids=position_ids)

    return strict


@pytest.mark.parametrize("how", [ignores, first_instead, does_not_know])
def test_log_probs_are_read_at_their_positions_however_a_forward_treats_the_option(
    how: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM

    config = saved(tmp_path, "gemma2")  # soft-capped logits: the head cannot be bypassed
    assert supports_logits_to_keep(loaded(config).model)
    monkeypatch.setattr(Gemma2ForCausalLM, "forward", how(Gemma2ForCausalLM.forward))
    model = loaded(config).model
    assert not supports_logits_to_keep(model)
    row = TokenSequence(prompt_ids=(5, 6, 7, 8, 9), completion_ids=(10, 11, 1))
    plan = make_plan([row], range(1), mini_batches=1, token_budget=100, pad_id=0, seed="", packed=False)
    logp_N, _ = plan_logprobs(model, plan, 1.0, torch.device("cpu"))
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    expected = model(input_ids=ids).logits.log_softmax(-1)[0, 4:7].gather(-1, ids[0, 5:, None])[:, 0]
    torch.testing.assert_close(logp_N, expected, rtol=1e-5, atol=1e-5)


def test_xlstm_is_read_at_its_positions(tmp_path: Path) -> None:
    """Its forward accepts `logits_to_keep` among other keywords and ignores it."""
    config = saved(tmp_path, "xlstm", hidden_size=128, num_heads=4)
    model = loaded(config).model
    row = TokenSequence(prompt_ids=(5, 6, 7, 8, 9), completion_ids=(10, 11, 1))
    plan = make_plan([row], range(1), mini_batches=1, token_budget=100, pad_id=0, seed="", packed=False)
    logp_N, _ = plan_logprobs(model, plan, 1.0, torch.device("cpu"))
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    expected = model(input_ids=ids).logits.float().log_softmax(-1)[0, 4:7].gather(-1, ids[0, 5:, None])[:, 0]
    torch.testing.assert_close(logp_N, expected, rtol=1e-3, atol=1e-3)


GENERATION: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no do_sample": ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95, "do_sample": True}),
    "greedy": ({"do_sample": False, "temperature": 0.6}, {"do_sample": True, "temperature": 0.6}),
    "beam settings without beams": ({"num_beams": 1, "length_penalty": 2.0, "early_stopping": True}, {}),
    "valid": ({"do_sample": True, "top_k": 20}, {"do_sample": True, "top_k": 20}),
}


@pytest.mark.parametrize("case", GENERATION)
def test_a_generation_config_that_cannot_be_saved_does_not_stop_the_run(
    case: str, tiny: Callable[..., Config], display: Any, tmp_path: Path
) -> None:
    config = saved(tmp_path / "model", "qwen3")
    given, kept = GENERATION[case]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, **given}))
    run = tiny("steps=1", "eval.every=0", "model.build=", f"model.path={config.path}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(run, display)
    found = GenerationConfig.from_pretrained(Path(run.run_dir) / "checkpoints/000001").to_diff_dict()
    assert found["eos_token_id"] == 1
    assert {k: found.get(k) for k in kept} == kept
