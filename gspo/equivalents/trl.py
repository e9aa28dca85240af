"""TRL's `GRPOConfig` (1.16), with the settings of its command-line scripts, and what they are here.

In: the values of a GRPOConfig. Out: the table, and `convert`. Invariant: as in `equivalent.py`. A test compares the
names and defaults with those of TRL.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from gspo.equivalents.equivalent import Conversion, Equivalent, converted, missing, same, unneeded

_BATCH = "rollout.prompts learner.mini_batches"
_OBJECTIVE = "objective.name"

_LINES: list[Equivalent] = [
    # ---- batches and steps
    same("num_generations", "rollout.group_size", 8),
    converted(
        "per_device_train_batch_size",
        _BATCH,
        8,
        "TRL counts completions per device, gspo counts prompts of all ranks: prompts = per_device_train_batch_size x "
        "processes x steps_per_generation / num_generations",
    ),
    converted(
        "gradient_accumulation_steps", _BATCH, 1, "memory is learner.micro_batch_tokens, which changes no result"
    ),
    converted(
        "steps_per_generation", _BATCH, None, "mini_batches = steps_per_generation / gradient_accumulation_steps"
    ),
    converted(
        "generation_batch_size", _BATCH, None, "in completions; prompts = generation_batch_size / num_generations"
    ),
    missing("num_iterations", 1, "a batch is trained on once; use more mini-batches, or more steps"),
    converted("max_steps", "steps", -1, "TRL counts optimizer steps, gspo counts rollout batches"),
    converted("num_train_epochs", "steps", 3.0, "steps = epochs x rows / prompts; an epoch is not a setting"),
    same("seed", "seed", 42),
    missing("shuffle_dataset", True, "rows are always shuffled, by seed"),
    # ---- sampling
    same("max_completion_length", "rollout.max_tokens", 512),
    same("max_prompt_length", "data.max_prompt_tokens", None, "a longer prompt is an error or is skipped, never cut"),
    same("temperature", "rollout.temperature", 1.0),
    same("top_p", "rollout.top_p", 1.0),
    converted("top_k", "rollout.top_k", 0),
    missing("min_p", None, "the learner's log-probs would not be those of the sampler", neutral=[0]),
    missing("repetition_penalty", 1.0, "the learner's log-probs would not be those of the sampler"),
    converted("generation_kwargs", "rollout.stop rollout.min_tokens", None, "stop strings and min_tokens only"),
    missing("chat_template_kwargs", None, "write the options into the tokenizer's chat template", neutral=[{}]),
    *unneeded("cache_implementation", "the engine has a paged KV cache"),
    converted("use_vllm", "rollout.engine", False, "otherwise gspo's own engine, which samples in batches"),
    converted(
        "vllm_mode",
        "rollout.engine_options",
        "colocate",
        "vLLM is in the learner's process, or on servers of gspo serve",
    ),
    same("vllm_gpu_memory_utilization", "rollout.engine_options.settings.gpu_memory_utilization", 0.3, carry=False),
    same("vllm_max_model_length", "rollout.engine_options.settings.max_model_len"),
    missing("vllm_tensor_parallel_size", 1, "vLLM runs on one GPU"),
    missing("vllm_structured_outputs_regex", None, "sampling is not constrained"),
    *(
        missing(name, default, "start servers with gspo serve and name them in rollout.engine_options.servers")
        for name, default in (
            ("vllm_server_base_url", None),
            ("vllm_server_host", "0.0.0.0"),
            ("vllm_server_port", 8000),
            ("vllm_server_timeout", 240.0),
            ("vllm_group_port", 51216),
        )
    ),
    converted(
        "vllm_importance_sampling_correction",
        "objective.mismatch",
        True,
        "TRL corrects by default with vLLM; gspo does if mismatch is set",
    ),
    converted(
        "vllm_importance_sampling_mode",
        "objective.mismatch",
        "sequence_mask",
        "gspo's sequence_mask bounds the geometric mean of the ratios, TRL's their product",
    ),
    converted("vllm_importance_sampling_clip_max", "objective.mismatch_high", 3.0),
    converted("vllm_importance_sampling_clip_min", "objective.mismatch_low", None),
    converted("vllm_importance_sampling_cap", "objective.mismatch_high", None, "TRL's old name of ..._clip_max"),
    # ---- the objective
    converted("loss_type", _OBJECTIVE, "dapo", "see the table of losses"),
    converted("importance_sampling_level", _OBJECTIVE, "token", "sequence with loss_type grpo is gspo"),
    converted("scale_rewards", "objective.advantage_scale", "group", "group is std, none is none; batch has none"),
    converted("epsilon", "objective.clip_low", 0.2, "sequence ratios need ranges around 3e-4"),
    converted("epsilon_high", "objective.clip_high", None, "the default is epsilon; of cispo it is weight_cap"),
    converted("delta", "objective.dual_clip", None, "the same bound if delta is at least 1 + epsilon_high"),
    converted("beta", "objective.kl", 0.0, "the default of objective grpo is 0.04, as in the paper"),
    converted("use_bias_correction_kl", "objective.kl_estimator", True, "true is k3_ratio, false is k3"),
    converted("sapo_temperature_pos", "objective.tau_pos", 1.0),
    converted("sapo_temperature_neg", "objective.tau_neg", 1.05),
    converted("vespo_k_pos", "objective.k_pos", 2.0),
    converted("vespo_lambda_pos", "objective.lambda_pos", 3.0),
    converted("vespo_k_neg", "objective.k_neg", 3.0),
    converted("vespo_lambda_neg", "objective.lambda_neg", 2.0),
    converted("mask_truncated_completions", "objective.shape", False, 'shape = ["overlong_filter"]'),
    converted("off_policy_mask_threshold", "objective.off_policy_mask", None),
    converted("entropy_coef", "objective.entropy", 0.0, "weighted like the loss; TRL takes the mean over tokens"),
    missing("use_adaptive_entropy", False, "objective.entropy is a constant coefficient"),
    *(
        missing(name, default, "objective.entropy is a constant coefficient")
        for name, default in (
            ("entropy_coef_min", 0.0),
            ("entropy_coef_max", 1.0),
            ("entropy_coef_delta", 0.005),
            ("entropy_target", 0.2),
        )
    ),
    missing("top_entropy_quantile", 1.0, "objectives train on all tokens; clip_cov and kl_cov select by covariance"),
    missing("sync_ref_model", False, "the reference stays the initial model"),
    missing("ref_model_mixup_alpha", 0.6, "the reference stays the initial model"),
    missing("ref_model_sync_steps", 512, "the reference stays the initial model"),
    converted("multi_objective_aggregation", "objective.normalize", "sum_then_normalize"),
    same("reward_weights", "reward.weights"),
    converted(
        "router_aux_loss_coef",
        "routing.balance_loss",
        None,
        "of MoE models; TRL's default is the coefficient in the model's config, gspo's is 0",
    ),
    # ---- the optimizer
    same("learning_rate", "learner.learning_rate", 1e-6),
    converted(
        "lr_scheduler_type",
        "learner.schedule learner.final_fraction",
        "linear",
        "TRL decays to 0 by default, gspo's default is constant; gspo's other schedules end at a tenth of the peak",
    ),
    converted(
        "lr_scheduler_kwargs",
        "learner.final_fraction",
        None,
        "min_lr_rate, or min_lr as a share of learning_rate, of cosine_with_min_lr; the others have no equivalent",
    ),
    converted("warmup_steps", "learner.warmup_updates", 0, "in optimizer steps in both; below 1 it is a fraction"),
    converted("warmup_ratio", "learner.warmup_updates", None, "warmup_updates is a number of optimizer steps"),
    same("adam_beta1", "learner.beta1", 0.9),
    same("adam_beta2", "learner.beta2", 0.999, "gspo's default is 0.95"),
    missing("adam_epsilon", 1e-8, "it is 1e-8"),
    same("weight_decay", "learner.weight_decay", 0.0),
    converted("max_grad_norm", "learner.max_grad_norm", 1.0, "0 (no clipping) becomes 1e9"),
    missing("optim", "adamw_torch_fused", "the optimizer is AdamW", ["adamw_torch", "adamw_hf"]),
    missing("optim_args", None, "the optimizer is AdamW"),
    missing("optim_target_modules", None, "the optimizer is AdamW"),
    missing("label_smoothing_factor", 0.0),
    missing("neftune_noise_alpha"),
    # ---- the model
    same("model_name_or_path", "model.path"),
    converted("model_init_kwargs", "model.dtype", None, "the dtype only"),
    missing("model_revision", "main", "download the revision, and give its directory in model.path"),
    converted("dtype", "model.dtype", "float32", "TRL loads float32 weights; gspo's auto is float16 on a GPU"),
    converted("torch_dtype", "model.dtype"),
    converted("bf16", "model.dtype", None, "TRL trains float32 weights in mixed precision; gspo stores them in dtype"),
    converted("fp16", "model.dtype", False, "gspo stores the weights in dtype; the optimizer is float32"),
    same(
        "gradient_checkpointing",
        "model.gradient_checkpointing",
        True,
        "TRL's default is true; it only saves memory",
        carry=False,
    ),
    missing("trust_remote_code", False, "set model.trust_remote_code yourself if you trust the model's code"),
    converted("use_peft", "model.lora.rank", False),
    converted("lora_r", "model.lora.rank", 16),
    converted("lora_alpha", "model.lora.alpha", 32),
    converted("lora_target_modules", "model.lora.targets", None, "all-linear is the default"),
    missing("lora_dropout", 0.05, "adapters have no dropout", neutral=[0, 0.0]),
    converted("load_in_4bit", "model.quantize", False, "nf4, with adapters only"),
    missing("load_in_8bit", False, "4 bits: model.quantize"),
    missing("bnb_4bit_quant_type", "nf4", "the 4-bit type is nf4"),
    missing("use_bnb_nested_quant", False),
    missing("bnb_4bit_quant_storage", None),
    missing("lora_target_parameters", None, "model.lora.experts adapts the experts of an MoE model"),
    missing("lora_modules_to_save", None, "only adapters are trained"),
    missing("use_rslora", False, "alpha = rank x lora_alpha / sqrt(rank) has the same effect"),
    missing("use_dora", False),
    converted("use_cpu", "model.device", False, "cpu"),
    # ---- data
    same("dataset_name", "data.hub"),
    same("dataset_config", "data.hub_config"),
    same("dataset_train_split", "data.split", "train", carry=False),
    missing("dataset_streaming", False, "rows are read once, before training"),
    missing("dataset_test_split", "test", "name a file in data.held_out_path, or a set in eval.sets"),
    missing("train_sampling_strategy", "random", "rows are visited in random order, each once per epoch"),
    missing("data_seed", None, "seed decides the order of the rows, too"),
    missing("ignore_data_skip", False, "a resumed run continues with the next rows"),
    converted("reward_funcs", "reward.functions", None, "file.py:function, with TRL's signature"),
    converted("tools", "environment.name", None, "file.py:function,function"),
    converted("environment_factory", "environment.name", None, "file.py:Class, unchanged"),
    converted("max_tool_calling_iterations", "environment.max_turns", None, "max_turns = iterations + 1"),
    missing("rollout_func", None, "write an environment (docs/environments.md)"),
    missing("reward_processing_classes", None, "the reward model reads its own tokenizer"),
    missing("optimizers", None, "the optimizer is AdamW", neutral=[(None, None)]),
    # ---- the run
    same("output_dir", "run_dir"),
    converted("run_name", "name"),
    converted("save_steps", "checkpoint.every", 500, "in optimizer steps there, in rollout batches here"),
    missing("save_strategy", "steps", "checkpoint.every is a number of steps", neutral=["no"]),
    same("save_total_limit", "checkpoint.keep"),
    converted("eval_strategy", "eval.every", "no"),
    converted("eval_steps", "eval.every", None, "in optimizer steps there, in rollout batches here"),
    converted("num_generations_eval", "eval.samples", None),
    converted("load_best_model_at_end", "checkpoint.keep_best", False, "kept as best; gspo save --checkpoint best"),
    missing("metric_for_best_model", None, "eval.metric: accuracy, accuracy_greedy or reward"),
    converted("report_to", "log.sinks", "none"),
    converted("project", "log.project", "huggingface"),
    missing("eval_delay", 0, "evaluations start before the first step"),
    missing("full_determinism", False, "runs are reproducible by default"),
    *(missing(name, None) for name in ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")),
    *(
        missing(name, default, "run gspo push after training")
        for name, default in (
            ("push_to_hub", False),
            ("hub_model_id", None),
            ("hub_token", None),
            ("hub_private_repo", None),
            ("hub_strategy", "every_save"),
            ("hub_always_push", False),
            ("hub_revision", None),
        )
    ),
    missing("log_completions_hub_repo", None),
    missing("resume_from_checkpoint", None, "run gspo train --resume RUN"),
    missing("restore_callback_states_from_checkpoint", False),
    missing("parallelism_config", None, "several GPUs: gspo train --nproc (docs/scale.md)"),
    missing("do_predict", False),
    *unneeded(
        "logging_steps logging_strategy logging_first_step logging_dir disable_tqdm log_level log_level_replica "
        "log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen skip_memory_metrics debug",
        "every step is recorded",
    ),
    *unneeded(
        "log_completions num_completions_to_print log_unique_prompts log_multimodal", "every completion is in rollouts/"
    ),
    *unneeded(
        "bf16_full_eval fp16_full_eval per_device_eval_batch_size eval_accumulation_steps do_train do_eval "
        "eval_on_start prediction_loss_only eval_do_concat_batches "
        "eval_use_gather_object include_for_metrics batch_eval_metrics "
        "greater_is_better",
        "evaluations measure accuracy and reward, also before the first step",
    ),
    *unneeded(
        "save_only_model save_on_each_node enable_jit_checkpoint", "a checkpoint holds a model directory and the state"
    ),
    *unneeded("auto_find_batch_size", "micro-batches are split if memory runs out"),
    *unneeded("env", "set the variables in the shell"),
    *unneeded(
        "remove_unused_columns dataloader_num_workers dataloader_pin_memory dataloader_drop_last pad_to_multiple_of "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context "
        "dataloader_in_order label_names length_column_name",
        "rows are read once, and every column reaches the reward functions",
    ),
    *unneeded(
        "ds3_gather_for_generation deepspeed fsdp fsdp_config ddp_find_unused_parameters ddp_timeout ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_static_graph ddp_backend local_rank accelerator_config ignore_bias_buffers "
        "average_tokens_across_devices",
        "weights are sharded by gspo train --nproc (docs/scale.md)",
    ),
    *unneeded(
        "use_liger_kernel torch_compile tf32 attn_implementation use_transformers_paged gradient_checkpointing_kwargs "
        "use_transformers_continuous_batching transformers_continuous_batching_config vllm_enable_sleep_mode "
        "vllm_model_impl torch_empty_cache_steps torch_compile_backend torch_compile_mode liger_kernel_config "
        "use_cache",
        "speed is automatic (model.compile, learner.micro_batch_tokens)",
    ),
    *unneeded("disable_dropout", "there is no dropout"),
    *unneeded("lora_task_type", "it is CAUSAL_LM"),
    *unneeded("cast_lm_head_to_fp32", "log-probs are always float32"),
]

TABLE: Mapping[str, Equivalent] = {line.name: line for line in _LINES}
"""TRL's settings by name."""

LOSS_SETTINGS = ("loss_type", "importance_sampling_level")
LOSSES: Mapping[tuple[str, str], str] = {
    ("grpo", "token"): "grpo",
    ("grpo", "sequence"): "gspo",
    ("dapo", "token"): "dapo",
    ("bnpo", "token"): "dapo",
    ("dr_grpo", "token"): "dr_grpo",
    ("cispo", "token"): "cispo",
    ("sapo", "token"): "sapo",
    ("vespo", "token"): "vespo",
    ("luspo", "sequence"): "luspo",
}
"""The objective of values of `LOSS_SETTINGS`. No objective has the other combinations."""
_CENTERED = ("dr_grpo", "vespo")
"""Objectives that do not divide by the standard deviation by default."""
_MISMATCH = {
    "token_truncate": "token_tis",
    "token_mask": "icepop",
    "sequence_truncate": "sequence_tis",
    "sequence_mask": "sequence_mask",
}
_SCHEDULES = {
    "linear": ("linear", 0.0),
    "cosine": ("cosine", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
}
_REWARDS = {
    "accuracy_reward": "math_answer",
    "reasoning_accuracy_reward": "math_answer",
    "think_format_reward": "completion_format",
}
"""Rewards of `trl.rewards` that are functions of ours under other names."""
_THINKING = "<think>(?!.*<think>).*</think>.*"
_DTYPES = ("float32", "bfloat16", "float16")
SPIKES = "gspo skips an optimizer step with a far larger gradient norm than usual; learner.spike = 0 turns it off"


def convert(values: Mapping[str, Any], *, rows: int | None = None, processes: int = 1) -> Conversion:
    """A GRPOConfig as settings. `rows` is the number of training rows, which turns epochs into steps; `processes` that
    of the launcher that TRL ran with."""
    done = Conversion(trainer="TRL", table=TABLE, given=values)
    done.copy_same()
    updates = _batches(done, processes)
    steps = _steps(done, updates, rows)
    _objective(done)
    _optimizer(done, updates, steps)
    _model(done)
    _sampling(done)
    _run(done, updates)
    _functions(done)
    return done


def _batches(done: Conversion, processes: int) -> int:
    """Prompts and mini-batches. Returns the optimizer steps per rollout batch."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "num_generations")
    device, accumulation, group = (done.number(name, int) for name in (names[0], names[1], names[3]))
    if not (device and accumulation and group):
        done.lose(names[0], "the batch is no number")
        return 1
    whole = device * processes
    generation = done.number("generation_batch_size", int) or whole * (
        done.number("steps_per_generation", int) or accumulation
    )
    per_generation = generation / whole
    if per_generation < accumulation:
        # An optimizer step then spans several calls of the sampler, all of the same weights.
        generation, per_generation = whole * accumulation, accumulation
    source = (*names[:2], "generation_batch_size") if done.has("generation_batch_size") else names
    if generation % group or per_generation % accumulation:
        done.lose(
            "generation_batch_size" if done.has("generation_batch_size") else names[0],
            f"{generation} completions are no whole number of groups of {group}, or of optimizer steps of "
            f"{whole * accumulation} completions",
        )
        return 1
    updates = int(per_generation // accumulation)
    done.put("rollout.prompts", generation // group, *source)
    done.put("learner.mini_batches", updates, *source[1:3])
    if updates > 1:
        done.differences.append(
            f"{updates} optimizer steps per batch: gspo normalizes each by its own tokens, TRL by the batch's mean"
        )
    return updates


def _steps(done: Conversion, updates: int, rows: int | None) -> int | None:
    most = done.number("max_steps", int)
    if most and most > 0:
        done.put("steps", math.ceil(most / updates), "max_steps")
    elif rows and "rollout.prompts" in done.settings:
        per_epoch = rows // done.settings["rollout.prompts"]
        done.put("steps", max(1, math.ceil(per_epoch * done.number("num_train_epochs"))), "num_train_epochs")
    else:
        epochs = done.number("num_train_epochs")
        done.todo.append(f"steps: {epochs:g} epochs are {epochs:g} x rows / rollout.prompts steps (--rows computes it)")
    return done.settings.get("steps")


def _objective(done: Conversion) -> None:
    loss, level = str(done.value("loss_type")), str(done.value("importance_sampling_level"))
    name = LOSSES.get((loss, level))
    if name is None:
        done.lose(
            "importance_sampling_level" if (loss, "token") in LOSSES else "loss_type",
            f"no objective combines loss_type {loss!r} and importance_sampling_level {level!r}; combine its parts in "
            "an objective of your own (docs/library.md)",
        )
        return
    done.put("objective.name", name, "loss_type", "importance_sampling_level")
    _scale(done, name)
    if loss == "bnpo":
        done.differences.append(
            "loss_type bnpo: gspo normalizes by the tokens of the optimizer step, not of the device"
        )
    _trust_region(done, name)
    if name == "dr_grpo":
        done.put("objective.max_length", done.number("max_completion_length", int), "max_completion_length")
    if name == "dapo":
        # Those are parts of DAPO that TRL's loss of the same name does not have.
        done.put("objective.keep", "all", "loss_type")
        done.put("objective.shape", [], "loss_type")
    if done.value("mask_truncated_completions"):
        done.put("objective.shape", ["overlong_filter"], "mask_truncated_completions")
        done.differences.append(
            "mask_truncated_completions: gspo leaves truncated completions out of the group's mean and of every "
            "denominator, TRL only out of the sum of the loss"
        )
    beta = done.number("beta")
    if beta:
        done.put("objective.kl", beta, "beta")
        estimator = "k3_ratio" if done.value("use_bias_correction_kl") else "k3"
        done.put("objective.kl_estimator", estimator, "use_bias_correction_kl")
        if level == "sequence" and estimator == "k3_ratio":
            done.differences.append(
                "use_bias_correction_kl: gspo weights the KL of a token by its own ratio, not by that of the completion"
            )
    elif name == "grpo":
        done.put("objective.kl", 0.0, "beta")
    for theirs, ours in (("off_policy_mask_threshold", "off_policy_mask"), ("entropy_coef", "entropy")):
        if done.number(theirs):
            done.put(f"objective.{ours}", done.number(theirs), theirs)
    if done.value("multi_objective_aggregation") == "normalize_then_sum":
        done.put("objective.normalize", "separate", "multi_objective_aggregation")
    if done.number("router_aux_loss_coef"):
        done.put("routing.balance_loss", done.number("router_aux_loss_coef"), "router_aux_loss_coef")


def _scale(done: Conversion, name: str) -> None:
    given = str(done.value("scale_rewards"))
    scale = {"True": "std", "False": "none", "group": "std", "none": "none"}.get(given)
    if scale is None:
        done.lose("scale_rewards", "advantages are divided by the standard deviation of the group, or by nothing")
    elif scale != ("none" if name in _CENTERED else "std"):
        done.put("objective.advantage_scale", scale, "scale_rewards")


def _trust_region(done: Conversion, name: str) -> None:
    low = done.number("epsilon")
    high = done.number("epsilon_high") or low
    if name == "cispo":
        done.put("objective.weight_cap", high, "epsilon_high", "epsilon")
        if high < 1:
            done.differences.append(
                f"epsilon_high = {high:g} caps the ratio of loss_type cispo itself (TRL's documentation uses 5)"
            )
    elif name == "sapo":
        done.put("objective.tau_pos", done.number("sapo_temperature_pos"), "sapo_temperature_pos")
        done.put("objective.tau_neg", done.number("sapo_temperature_neg"), "sapo_temperature_neg")
    elif name == "vespo":
        for part in ("k_pos", "lambda_pos", "k_neg", "lambda_neg"):
            done.put(f"objective.{part}", done.number(f"vespo_{part}"), f"vespo_{part}")
    elif low is not None and high is not None:
        done.put("objective.clip_low", low, "epsilon")
        done.put("objective.clip_high", high, "epsilon_high", "epsilon")
        delta = done.number("delta")
        if delta and delta >= 1 + high:
            done.put("objective.dual_clip", delta, "delta")
        elif delta:
            done.lose("delta", "objective.dual_clip must be above the clip range")
        if name in ("gspo", "luspo") and low > 0.05:
            done.differences.append(
                f"epsilon = {low:g} clips no sequence ratio, which is near 1; the paper's range is 3e-4 and 4e-4"
            )


def _optimizer(done: Conversion, updates: int, steps: int | None) -> None:
    scheduler = str(done.value("lr_scheduler_type")).rpartition(".")[2].lower()
    given = done.value("lr_scheduler_kwargs") or {}
    options = dict(json.loads(given) if isinstance(given, str) else given)  # TRL's command line takes JSON
    floor = _lowest_rate(done, options) if scheduler == "cosine_with_min_lr" else None
    if options:
        done.lose("lr_scheduler_kwargs", "learner.final_fraction is the only option of a schedule")
    if floor is not None:
        done.put("learner.schedule", "cosine", "lr_scheduler_type")
        done.put("learner.final_fraction", floor, "lr_scheduler_kwargs")
    elif scheduler in _SCHEDULES:
        kind, final = _SCHEDULES[scheduler]
        done.put("learner.schedule", kind, "lr_scheduler_type")
        if final is not None:
            done.put("learner.final_fraction", final, "lr_scheduler_type")
    else:
        done.lose("lr_scheduler_type", "the schedules are constant, linear and cosine")
    warmup, ratio = done.number("warmup_steps"), done.number("warmup_ratio")
    if warmup and warmup >= 1:
        done.put("learner.warmup_updates", int(warmup), "warmup_steps")
    elif fraction := warmup or ratio:
        name = "warmup_steps" if warmup else "warmup_ratio"
        if steps:
            done.put("learner.warmup_updates", math.ceil(fraction * steps * updates), name)
        else:
            done.todo.append(
                f"learner.warmup_updates: {fraction} of all optimizer steps (steps x learner.mini_batches)"
            )
    norm = done.number("max_grad_norm")
    if norm is not None:
        done.put("learner.max_grad_norm", norm or 1e9, "max_grad_norm")
    done.differences.append(SPIKES)


def _model(done: Conversion) -> None:
    options = done.value("model_init_kwargs")
    given = dict(options) if isinstance(options, Mapping) else {}
    dtype, source = given.pop("dtype", None) or given.pop("torch_dtype", None), "model_init_kwargs"
    for name in ("dtype", "torch_dtype"):
        if not dtype and done.has(name):
            dtype, source = done.value(name), name
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
        if not dtype and done.has(name) and done.value(name):
            dtype, source = kind, name
    dtype = str(dtype or "").removeprefix("torch.")
    if dtype in _DTYPES:
        done.put("model.dtype", dtype, source)
    given.pop("attn_implementation", None)
    if given or (options is not None and not isinstance(options, Mapping)):
        done.lose("model_init_kwargs", f"{', '.join(given) or 'text'}: only dtype and attn_implementation are read")
    if done.value("use_cpu"):
        done.put("model.device", "cpu", "use_cpu")
    if done.value("use_peft"):
        done.put("model.lora.rank", done.number("lora_r", int), "lora_r", "use_peft")
        done.put("model.lora.alpha", done.number("lora_alpha", int), "lora_alpha", "use_peft")
        targets = done.value("lora_target_modules")
        targets = [targets] if isinstance(targets, str) else list(targets or ())
        if not targets:
            done.differences.append(
                "lora_target_modules: without it, peft adapts the layers that it knows for the model type (often "
                "q_proj and v_proj), gspo all linear layers; name them in model.lora.targets"
            )
        elif targets != ["all-linear"]:
            done.put("model.lora.targets", targets, "lora_target_modules")
        if not done.has("lora_dropout") and done.value("lora_dropout"):
            done.differences.append("lora_dropout: its default is 0.05; adapters have no dropout here")
    if done.value("load_in_4bit"):
        done.put("model.quantize", "nf4", "load_in_4bit")


def _sampling(done: Conversion) -> None:
    top_k = done.number("top_k", int)
    done.put("rollout.top_k", max(0, top_k or 0), "top_k")
    given = done.value("generation_kwargs")
    options = dict(given) if isinstance(given, Mapping) else {}
    for names, key in (
        (("stop", "stop_strings"), "rollout.stop"),
        (("min_tokens", "min_new_tokens"), "rollout.min_tokens"),
    ):
        for name in names:
            if name in options:
                value = options.pop(name)
                value = [value] if isinstance(value, str) else value
                done.put(key, value, "generation_kwargs")
    if options or (given is not None and not isinstance(given, Mapping)):
        done.lose("generation_kwargs", f"{', '.join(options) or 'the text'} has no equivalent; see [rollout]")
    if not done.value("use_vllm"):
        for key in [k for k in done.settings if k.startswith("rollout.engine_options.")]:
            del done.settings[key]
        return
    done.put("rollout.engine", "vllm", "use_vllm")
    if done.given.get("vllm_mode") == "server":
        done.differences.append(
            "vllm_mode = 'server': vLLM runs in the learner's process; for servers see docs/engines.md"
        )
    if not done.value("vllm_importance_sampling_correction"):
        return
    mode = str(done.value("vllm_importance_sampling_mode"))
    if mode == "sequence_mask" or mode not in _MISMATCH:
        done.differences.append(
            "vllm_importance_sampling_mode = 'sequence_mask' bounds the product of a completion's ratios, for which "
            "gspo has no correction; it is off, and objective.mismatch offers others"
        )
        return
    done.put("objective.mismatch", _MISMATCH[mode], "vllm_importance_sampling_mode")
    cap = "vllm_importance_sampling_cap"
    high = cap if done.has(cap) else "vllm_importance_sampling_clip_max"
    if done.number(high):
        done.put("objective.mismatch_high", done.number(high), high)
    low = done.number("vllm_importance_sampling_clip_min")
    if low and mode == "token_mask":
        done.put("objective.mismatch_low", low, "vllm_importance_sampling_clip_min")
    elif low:
        done.lose("vllm_importance_sampling_clip_min", "truncation has no lower bound")


def _run(done: Conversion, updates: int) -> None:
    done.put_name("run_name")
    if done.has("save_steps") and (every := done.number("save_steps")) and every >= 1:
        done.put("checkpoint.every", max(1, round(every / updates)), "save_steps")
    # TRL trains on all rows. An evaluation has rows of its own.
    done.put("data.held_out", 0, "eval_strategy")
    strategy = str(done.value("eval_strategy")).rpartition(".")[2].lower()
    if strategy == "no":
        done.put("eval.every", 0, "eval_strategy")
    else:
        _evaluation(done, updates, strategy)
    done.put_sinks("report_to", project="project", ignored=["none"])


def _lowest_rate(done: Conversion, options: dict[str, Any]) -> float | None:
    """The last learning rate of `cosine_with_min_lr` as a share of the peak. What is used is taken from `options`."""
    rate, lowest = options.pop("min_lr_rate", None), options.pop("min_lr", None)
    peak = done.number("learning_rate")
    if rate is None and lowest is not None and peak:
        rate = float(lowest) / peak
    return None if rate is None else float(rate)


def _evaluation(done: Conversion, updates: int, strategy: str) -> None:
    if (every := done.number("eval_steps")) and every >= 1:
        done.put("eval.every", max(1, round(every / updates)), "eval_steps")
    elif strategy == "epoch":
        done.todo.append("eval.every: an epoch is rows / rollout.prompts steps")
    samples = "num_generations_eval" if done.has("num_generations_eval") else "num_generations"
    done.put("eval.samples", done.number(samples, int), samples)
    done.put("eval.greedy", False, "eval_strategy")
    if done.value("load_best_model_at_end"):
        done.put("checkpoint.keep_best", True, "load_best_model_at_end")


def _provided(done: Conversion, functions: list[Any]) -> None:
    """What rewards of `trl.rewards` need, and those that are neither there nor in a file."""
    ours = [_REWARDS.get(name) for name in functions]
    if "math_answer" in ours:
        done.put("data.answer_field", "solution", "reward_funcs")
        done.differences.append(
            "accuracy_reward reads the column solution and skips what it cannot parse; math_answer reads "
            "data.answer_field, refuses such rows, and compares the final answer"
        )
    if "completion_format" in ours:
        done.put("reward.options.completion_format.pattern", _THINKING, "reward_funcs")
    for name in map(str, functions):
        if name == "get_soft_overlong_punishment":
            done.todo.append(f'reward.functions: {name}: leave it out, and set objective.shape = ["soft_overlong"]')
        elif ".py:" not in name and ("." in name or "/" in name):
            done.todo.append(
                f"reward.functions: {name}: name a function as file.py:function, and a reward model in the options of "
                "reward_model (docs/rewards.md)"
            )


def _functions(done: Conversion) -> None:
    """Reward functions, tools and environments: `file.py:name` from a script, or objects, which `gspo.trl` locates."""
    functions = done.value("reward_funcs")
    functions = [functions] if isinstance(functions, str) else list(functions or ())
    if functions:
        done.put("reward.functions", [_REWARDS.get(name, name) for name in functions], "reward_funcs")
        _provided(done, functions)
    for name in ("tools", "environment_factory"):
        given = done.value(name)
        if isinstance(given, str):
            done.put("environment.name", given, name)
        elif given:
            done.lose(name, "name them in environment.name as file.py:name (docs/environments.md)")
    if turns := done.number("max_tool_calling_iterations", int):
        if "environment.name" in done.settings:
            done.put("environment.max_turns", turns + 1, "max_tool_calling_iterations")
        else:
            done.lose("max_tool_calling_iterations", "has no effect without tools")
