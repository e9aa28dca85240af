"""verl's overrides of `main_ppo` (its configuration of August 2026) and what they are here.

In: verl's settings by dotted key. Out: the table, and `convert`. Invariant: as in `equivalent.py`. A setting of a
section that has no part in critic-free training on one machine has no line of its own: `SECTIONS` says why it is not
needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo.equivalents.equivalent import Conversion, Equivalent, Kind, converted, missing, same, unneeded
from gspo.equivalents.trl import SPIKES

_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_OBJECTIVE = "objective.name"
_ENGINE = (
    "mode", "dtype", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine", "max_num_batched_tokens",
    "max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode", "scheduling_policy",
    "load_format", "layered_summon", "disable_log_stats", "over_sample_rate", "multi_stage_wake_up",
    "skip_tokenizer_init", "prompt_length", "response_length", "seed", "full_determinism",
    "update_weights_bucket_megabytes", "nnodes", "n_gpus_per_node",
)  # fmt: skip

_LINES: list[Equivalent] = [
    # ---- batches and steps
    same("data.train_batch_size", "rollout.prompts", 1024, "prompts in both"),
    converted(
        "data.gen_batch_size", "rollout.refill_budget", None, "groups are refilled one batch of prompts at a time"
    ),
    same(f"{_ROLLOUT}.n", "rollout.group_size", 1),
    converted(
        f"{_ACTOR}.ppo_mini_batch_size",
        "learner.mini_batches",
        256,
        "mini_batches = train_batch_size / ppo_mini_batch_size; verl counts prompts in both",
    ),
    missing(f"{_ACTOR}.ppo_epochs", 1, "a batch is trained on once; use more mini-batches, or more steps"),
    missing(f"{_ACTOR}.shuffle", False, "the order of the completions within a batch has no effect on the gradient"),
    converted(f"{_ACTOR}.ppo_max_token_len_per_gpu", "learner.micro_batch_tokens", 16384, "only with use_dynamic_bsz"),
    converted(
        f"{_ACTOR}.use_dynamic_bsz", "learner.micro_batch_tokens", False, "micro-batches are always cut by tokens"
    ),
    *unneeded(
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu {_ACTOR}.ppo_micro_batch_size "
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu {_ROLLOUT}.log_prob_micro_batch_size "
        f"{_ROLLOUT}.log_prob_use_dynamic_bsz {_ROLLOUT}.log_prob_max_token_len_per_gpu",
        "micro-batches are cut by learner.micro_batch_tokens and change no result",
    ),
    converted("trainer.total_training_steps", "steps", None, "rollout batches in both"),
    converted("trainer.total_epochs", "steps", 30, "steps = epochs x rows / prompts; an epoch is not a setting"),
    # ---- sampling
    same("data.max_response_length", "rollout.max_tokens", 512),
    same("data.max_prompt_length", "data.max_prompt_tokens", 512),
    converted("data.truncation", "data.on_bad_row", "error", "a prompt is never truncated"),
    converted("data.filter_overlong_prompts", "data.on_bad_row", False, 'true is on_bad_row = "skip"'),
    same(f"{_ROLLOUT}.temperature", "rollout.temperature", 1.0),
    same(f"{_ROLLOUT}.top_p", "rollout.top_p", 1.0),
    converted(f"{_ROLLOUT}.top_k", "rollout.top_k", -1),
    missing(f"{_ROLLOUT}.ignore_eos", False, "completions end with an end token"),
    missing(f"{_ROLLOUT}.do_sample", True, "training samples"),
    converted(f"{_ROLLOUT}.name", "rollout.engine", None, "vllm, or gspo's own engine local; there is no sglang"),
    same(
        f"{_ROLLOUT}.gpu_memory_utilization", "rollout.engine_options.settings.gpu_memory_utilization", 0.5, carry=False
    ),
    same(f"{_ROLLOUT}.max_model_len", "rollout.engine_options.settings.max_model_len"),
    missing(f"{_ROLLOUT}.tensor_model_parallel_size", 2, "vLLM runs on one GPU, or on servers of gspo serve", [1]),
    *(
        missing(f"{_ROLLOUT}.{name}", 1, "vLLM runs on one GPU, or on servers of gspo serve")
        for name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
    ),
    converted(
        f"{_ROLLOUT}.calculate_log_probs", "objective.mismatch", None, "log-probs of the engine are always recorded"
    ),
    converted(f"{_ROLLOUT}.multi_turn.enable", "environment.name", False, "name an environment (docs/environments.md)"),
    missing(f"{_ROLLOUT}.multi_turn.tool_config_path", None, "name tools in environment.name as file.py:function"),
    missing(f"{_ROLLOUT}.multi_turn.function_tool_path", None, "name tools in environment.name as file.py:function"),
    missing(f"{_ROLLOUT}.multi_turn.interaction_config_path", None, "write an environment (docs/environments.md)"),
    same(f"{_ROLLOUT}.multi_turn.max_assistant_turns", "environment.max_turns"),
    missing(f"{_ROLLOUT}.multi_turn.max_user_turns", None, "environment.max_turns counts the turns of the model"),
    same(f"{_ROLLOUT}.multi_turn.format", "environment.tool_format", "hermes", carry=False),
    converted(f"{_ROLLOUT}.enable_rollout_routing_replay", "routing.replay", False, 'replay = "sampler"'),
    converted(f"{_ACTOR}.router_replay.mode", "routing.replay", "disabled", "R2 is old, R3 is sampler"),
    *unneeded(
        " ".join(f"{_ROLLOUT}.{name}" for name in _ENGINE),
        "the engine chooses it, or it follows from other settings",
    ),
    # ---- the objective
    converted("algorithm.adv_estimator", _OBJECTIVE, "gae", "gae needs a critic, which gspo does not have"),
    converted(f"{_ACTOR}.policy_loss.loss_mode", _OBJECTIVE, "vanilla"),
    converted(f"{_ACTOR}.loss_agg_mode", _OBJECTIVE, "token-mean", "see the table of losses"),
    converted(f"{_ACTOR}.loss_scale_factor", "objective.max_length", None),
    converted("algorithm.norm_adv_by_std_in_grpo", "objective.advantage_scale", True, "false is none"),
    converted(f"{_ACTOR}.clip_ratio", "objective.clip_low objective.clip_high", 0.2),
    converted(f"{_ACTOR}.clip_ratio_low", "objective.clip_low", 0.2),
    converted(f"{_ACTOR}.clip_ratio_high", "objective.clip_high", 0.2, "of cispo: weight_cap = 1 + clip_ratio_high"),
    converted(f"{_ACTOR}.clip_ratio_c", "objective.dual_clip", 3.0, "dual clip is off by default here"),
    converted(f"{_ACTOR}.tau_pos", "objective.tau_pos", 1.0),
    converted(f"{_ACTOR}.tau_neg", "objective.tau_neg", 1.05),
    converted(f"{_ACTOR}.policy_loss.clip_cov_ratio", "objective.select_fraction", 0.0002),
    converted(f"{_ACTOR}.policy_loss.clip_cov_lb", "objective.cov_low", 1.0),
    converted(f"{_ACTOR}.policy_loss.clip_cov_ub", "objective.cov_high", 5.0),
    converted(f"{_ACTOR}.policy_loss.kl_cov_ratio", "objective.select_fraction", 0.0002),
    converted(f"{_ACTOR}.policy_loss.ppo_kl_coef", "objective.cov_kl", 0.1),
    converted(f"{_ACTOR}.use_kl_loss", "objective.kl", False),
    converted(f"{_ACTOR}.kl_loss_coef", "objective.kl", 0.001, "only with use_kl_loss"),
    converted(
        f"{_ACTOR}.kl_loss_type", "objective.kl_estimator", "low_var_kl", "low_var_kl is k3, kl is k1, mse is k2"
    ),
    converted("algorithm.use_kl_in_reward", "objective.kl_in", False),
    converted("algorithm.kl_penalty", "objective.kl_estimator", "kl", "only with use_kl_in_reward"),
    converted("algorithm.kl_ctrl.kl_coef", "objective.kl", 0.001, "only with use_kl_in_reward"),
    missing("algorithm.kl_ctrl.type", "fixed", "the coefficient is constant"),
    missing("algorithm.kl_ctrl.target_kl", 0.1, "the coefficient is constant"),
    missing("algorithm.kl_ctrl.horizon", 10000, "the coefficient is constant"),
    same(f"{_ACTOR}.entropy_coeff", "objective.entropy", 0, "weighted like the loss in both", carry=False),
    converted("algorithm.filter_groups.enable", "objective.keep", False, 'keep = "mixed"'),
    converted("algorithm.filter_groups.metric", "objective.keep", None, "mixed compares the reward of a group"),
    converted("algorithm.filter_groups.max_num_gen_batches", "rollout.refill_budget", 0, '0 is refill_budget = "full"'),
    converted("reward_model.overlong_buffer.enable", "objective.shape", False, 'shape = ["soft_overlong"]'),
    converted("reward_model.overlong_buffer.len", "objective.overlong_cache"),
    missing("reward_model.overlong_buffer.penalty_factor", 1.0, "the penalty is at most 1"),
    missing("algorithm.gamma", 1.0, "a reward counts for the whole completion"),
    missing("algorithm.lam", 1.0, "there is no critic"),
    missing("algorithm.use_pf_ppo", False),
    converted("algorithm.rollout_correction.rollout_is", "objective.mismatch", None, "token_tis or sequence_tis"),
    converted("algorithm.rollout_correction.rollout_is_threshold", "objective.mismatch_high", 2.0),
    missing(
        "algorithm.rollout_correction.rollout_rs", None, "objective.mismatch icepop or sequence_mask reject tokens"
    ),
    missing("algorithm.rollout_correction.rollout_rs_threshold", None),
    converted("algorithm.rollout_correction.bypass_mode", "learner.old_logp", False, 'true is "sampler"'),
    missing("algorithm.rollout_correction.loss_type", "ppo_clip"),
    missing("algorithm.rollout_correction.rollout_is_batch_normalize", False),
    # ---- the optimizer
    same(f"{_ACTOR}.optim.lr", "learner.learning_rate", 1e-6),
    converted(
        f"{_ACTOR}.optim.lr_warmup_steps", "learner.warmup_updates", -1, "verl counts batches, gspo optimizer steps"
    ),
    converted(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "learner.warmup_updates", 0.0),
    converted(f"{_ACTOR}.optim.lr_scheduler_type", "learner.schedule", "constant", "constant or cosine in both"),
    converted(f"{_ACTOR}.optim.warmup_style", "learner.schedule", None, "verl's old name of lr_scheduler_type"),
    converted(f"{_ACTOR}.optim.min_lr_ratio", "learner.final_fraction", 0.0),
    missing(f"{_ACTOR}.optim.num_cycles", 0.5, "a cosine schedule ends at its lowest point"),
    same(f"{_ACTOR}.optim.weight_decay", "learner.weight_decay", 0.01, "gspo's default is 0"),
    converted(f"{_ACTOR}.optim.betas", "learner.beta1 learner.beta2", (0.9, 0.999), "gspo's default is 0.9 and 0.95"),
    missing(f"{_ACTOR}.optim.optimizer", "AdamW", "the optimizer is AdamW"),
    converted(f"{_ACTOR}.grad_clip", "learner.max_grad_norm", 1.0),
    *unneeded(f"{_ACTOR}.optim.clip_grad {_ACTOR}.optim.total_training_steps", "it follows from other settings"),
    # ---- the model
    same(f"{_MODEL}.path", "model.path"),
    same(f"{_MODEL}.enable_gradient_checkpointing", "model.gradient_checkpointing", True, carry=False),
    same(f"{_MODEL}.trust_remote_code", "model.trust_remote_code", False, carry=False),
    converted(f"{_MODEL}.lora_rank", "model.lora.rank", 0),
    converted(f"{_MODEL}.lora_alpha", "model.lora.alpha", 16),
    converted(f"{_MODEL}.target_modules", "model.lora.targets", "all-linear"),
    missing(f"{_MODEL}.exclude_modules", None, "name the layers in model.lora.targets", [[]]),
    missing(f"{_MODEL}.lora_adapter_path", None, "give the directory of the adapter in model.path"),
    missing(f"{_MODEL}.custom_chat_template", None, "write it into the tokenizer"),
    missing(f"{_MODEL}.override_config", None, "change config.json of the model", [{}]),
    missing(f"{_MODEL}.tokenizer_path", None, "the tokenizer is that of the model"),
    *unneeded(
        f"{_MODEL}.use_remove_padding {_MODEL}.use_fused_kernels {_MODEL}.use_liger {_MODEL}.use_shm "
        f"{_MODEL}.enable_activation_offload {_MODEL}.external_lib {_ACTOR}.use_torch_compile "
        f"{_ACTOR}.use_fused_kernels {_ACTOR}.use_remove_padding {_ACTOR}.entropy_checkpointing "
        f"{_ACTOR}.entropy_from_logits_with_chunking",
        "sequences are always packed, and speed is automatic (model.compile)",
    ),
    same(f"{_ACTOR}.ulysses_sequence_parallel_size", "learner.context_parallel", 1, carry=False),
    # ---- data and rewards
    converted("data.train_files", "data.path", None, "one file; several are sources of data.mix"),
    converted("data.val_files", "data.held_out_path", None, "one file; several are tables of eval.sets"),
    same("data.prompt_key", "data.prompt_field", "prompt", carry=False),
    missing("data.reward_fn_key", "data_source", "all columns reach the reward functions", ["data_source"]),
    missing("data.shuffle", True, "rows are always shuffled, by seed"),
    converted("data.seed", "seed", None),
    missing("data.train_max_samples", -1, "shorten the file"),
    converted("data.val_max_samples", "eval.sets", -1, "eval.sets.NAME.size"),
    missing("data.apply_chat_template_kwargs", None, "write the options into the tokenizer's chat template", [{}]),
    missing("data.custom_cls.path", None, "write the rows into a file"),
    missing("data.sampler.class_path", None, 'data.sampling = "difficulty" samples by pass rate'),
    converted("reward.custom_reward_function.path", "reward.functions", None, "with another signature, see below"),
    converted("reward.custom_reward_function.name", "reward.functions", "compute_score", "file.py:name"),
    converted("custom_reward_function.path", "reward.functions", None, "with another signature, see below"),
    converted("custom_reward_function.name", "reward.functions", None, "file.py:name"),
    missing("reward.reward_manager.name", "naive", "reward functions score groups; each has a time limit", ["dapo"]),
    missing(
        "reward_model.reward_manager", None, "reward functions score groups; each has a time limit", ["naive", "dapo"]
    ),
    missing("reward_model.enable", None, "use the reward function reward_model (docs/rewards.md)", [False]),
    missing("reward.reward_model.enable", False, "use the reward function reward_model (docs/rewards.md)"),
    missing("reward.sandbox_fusion.url", None, "use the reward function code_tests, which has a sandbox of its own"),
    *unneeded("reward.num_workers reward_model.launch_reward_fn_async", "reward functions run in worker processes"),
    # ---- the run
    converted("trainer.experiment_name", "name", "gsm8k"),
    converted("trainer.project_name", "log.project", "verl_examples"),
    converted("trainer.logger", "log.sinks", None, "the console and files are always written"),
    converted("trainer.default_local_dir", "run_dir"),
    converted("trainer.save_freq", "checkpoint.every", -1, "there is always a checkpoint at the end"),
    converted("trainer.test_freq", "eval.every", -1),
    same("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    converted("trainer.val_before_train", "eval.every", True, "there is always an evaluation before the first step"),
    missing("trainer.val_only", False, "run gspo eval"),
    missing("trainer.resume_mode", "auto", "run gspo train --resume RUN", ["disable"]),
    missing("trainer.resume_from_path", None, "run gspo train --resume RUN"),
    converted("trainer.n_gpus_per_node", "ranks", None, "gspo train --nproc N (docs/scale.md)"),
    converted("trainer.nnodes", "ranks", 1, "gspo train --cluster, or torchrun (docs/scale.md)"),
    missing("trainer.device", "cuda", "model.device is auto"),
    converted(f"{_ROLLOUT}.val_kwargs.n", "eval.samples", 1),
    missing(f"{_ROLLOUT}.val_kwargs.temperature", 0, "evaluations sample with rollout.temperature, and greedily"),
    converted(f"{_ROLLOUT}.val_kwargs.do_sample", "eval.greedy", False, "both are measured"),
    missing(f"{_ROLLOUT}.val_kwargs.top_p", 1.0, "evaluations sample with rollout.top_p"),
    missing(f"{_ROLLOUT}.val_kwargs.top_k", -1, "evaluations sample with rollout.top_k"),
    *unneeded(
        "trainer.balance_batch trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir "
        "trainer.del_local_ckpt_after_load trainer.critic_warmup data.dataloader_num_workers data.validation_shuffle "
        "data.val_batch_size data.return_raw_chat data.filter_overlong_prompts_workers data.use_shm data.tokenizer "
        "trainer.esi_redundant_time trainer.default_hdfs_dir trainer.max_critic_ckpt_to_keep trainer.use_v1 "
        "trainer.ray_wait_register_center_timeout trainer.use_legacy_worker_impl "
        "data.trust_remote_code data.image_key data.video_key data.return_full_prompt data.return_raw_input_ids",
        "every completion is recorded, and the rest follows from other settings",
    ),
]

TABLE: Mapping[str, Equivalent] = {line.name: line for line in _LINES}
"""verl's settings by dotted key."""

SECTIONS: Mapping[str, str] = {
    "critic": "there is no critic",
    "actor_rollout_ref.ref": "the reference follows the policy's settings",
    f"{_ACTOR}.fsdp_config": "weights are sharded by gspo train --nproc; gspo plan says what fits",
    f"{_ACTOR}.megatron": "weights are sharded by gspo train --nproc; gspo plan says what fits",
    f"{_ACTOR}.strategy": "weights are sharded by gspo train --nproc",
    f"{_ACTOR}.checkpoint": "a checkpoint holds all that a resume needs",
    f"{_ACTOR}.profiler": "timings.jsonl has the time of every phase",
    f"{_ROLLOUT}.engine_kwargs": "options of vLLM are in rollout.engine_options.settings",
    f"{_ROLLOUT}.agent": "an environment runs in processes of its own",
    f"{_ROLLOUT}.trace": "every completion is recorded",
    f"{_ROLLOUT}.profiler": "timings.jsonl has the time of every phase",
    f"{_ROLLOUT}.checkpoint_engine": "weights are sent to vLLM when they change",
    f"{_ROLLOUT}.prometheus": "gspo watch shows the run",
    "actor_rollout_ref.hybrid_engine": "the engine follows the learner",
    "actor_rollout_ref.nccl_timeout": "ranks.timeout_s",
    "ray_kwargs": "gspo train --cluster connects to Ray",
    "global_profiler": "timings.jsonl has the time of every phase",
    "transfer_queue": "ranks exchange batches themselves",
    "trainer.v1": "asynchronous sampling is rollout.max_lag",
    "hydra": "there are no hydra outputs",
}
"""Sections without lines of their own, by prefix, and why they are not needed."""

LOSS_SETTINGS = ("policy_loss.loss_mode", "loss_agg_mode", "algorithm.adv_estimator")
LOSSES: Mapping[tuple[str, str, str], str] = {
    ("vanilla", "token-mean", "grpo"): "dapo",
    ("vanilla", "seq-mean-token-mean", "grpo"): "grpo",
    ("vanilla", "seq-mean-token-sum-norm", "grpo"): "dr_grpo",
    ("vanilla", "token-mean", "reinforce_plus_plus"): "reinforce_pp",
    ("gspo", "seq-mean-token-mean", "grpo"): "gspo",
    ("sapo", "seq-mean-token-mean", "grpo"): "sapo",
    ("geo_mean", "seq-mean-token-mean", "grpo"): "gmpo",
    ("cispo", "token-mean", "grpo"): "cispo",
    ("clip_cov", "token-mean", "grpo"): "clip_cov",
    ("kl_cov", "token-mean", "grpo"): "kl_cov",
    ("gpg", "token-mean", "gpg"): "gpg",
    ("vanilla", "token-mean", "rloo"): "rloo",
}
"""The objective of values of `LOSS_SETTINGS`."""
_RENAMED = {
    "reward.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
}
_OWN_AGGREGATE = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}
"""Loss modes that ignore loss_agg_mode."""
_CENTERED = ("dr_grpo",)
_WITHOUT_SCALE = ("gpg", "rloo", "reinforce_pp")
_ESTIMATORS = {
    "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+"
}  # fmt: skip


def convert(values: Mapping[str, Any], *, rows: int | None = None, processes: int = 1) -> Conversion:
    """Overrides as settings. `rows` is the number of training rows, which turns epochs into steps. verl counts batches
    over all processes, so their number changes nothing."""
    table = dict(TABLE)
    values = {_renamed(name): value for name, value in values.items()}
    for name in values:
        why = None if name in table else _section(name)
        if why:
            table[name] = Equivalent(name=name, kind=Kind.UNNEEDED, note=why)
    done = Conversion(trainer="verl", table=table, given=values)
    done.copy_same()
    updates = _batches(done)
    steps = _steps(done, rows)
    _objective(done)
    _optimizer(done, updates, steps)
    _model(done)
    _sampling(done)
    _data(done)
    _run(done)
    return done


def _renamed(name: str) -> str:
    """The name in the table of a setting that versions of verl call differently."""
    old = next((old for old in _RENAMED if name.startswith(f"{old}.")), None)
    return f"{_RENAMED[old]}{name.removeprefix(old)}" if old else name


def _section(name: str) -> str | None:
    """Why a setting without a line is not needed; None if that is unknown."""
    return next((why for prefix, why in SECTIONS.items() if name == prefix or name.startswith(f"{prefix}.")), None)


def _batches(done: Conversion) -> int:
    name = f"{_ACTOR}.ppo_mini_batch_size"
    prompts, mini = done.number("data.train_batch_size", int), done.number(name, int)
    if not prompts or not mini:
        done.lose(name, "is no number")
        return 1
    updates = max(1, math.ceil(prompts / mini))
    done.put("learner.mini_batches", updates, "data.train_batch_size", name)
    if done.value(f"{_ACTOR}.use_dynamic_bsz") and done.has(f"{_ACTOR}.ppo_max_token_len_per_gpu"):
        done.put("learner.micro_batch_tokens", done.number(f"{_ACTOR}.ppo_max_token_len_per_gpu", int),
                 f"{_ACTOR}.ppo_max_token_len_per_gpu")  # fmt: skip
    return updates


def _steps(done: Conversion, rows: int | None) -> int | None:
    epochs = done.number("trainer.total_epochs")
    if done.number("trainer.total_training_steps", int):
        done.put("steps", done.number("trainer.total_training_steps", int), "trainer.total_training_steps")
    elif rows and done.settings.get("rollout.prompts"):
        # verl drops the last rows of an epoch that fill no batch.
        done.put("steps", max(1, int(rows // done.settings["rollout.prompts"] * epochs)), "trainer.total_epochs")
    else:
        done.todo.append(f"steps: {epochs:g} epochs are {epochs:g} x rows / rollout.prompts steps (--rows computes it)")
    return done.settings.get("steps")


def _objective(done: Conversion) -> None:
    mode, estimator = str(done.value(f"{_ACTOR}.policy_loss.loss_mode")), str(done.value("algorithm.adv_estimator"))
    aggregate = _OWN_AGGREGATE.get(mode, str(done.value(f"{_ACTOR}.loss_agg_mode")))
    name = LOSSES.get((mode, aggregate, estimator.removesuffix("_vectorized")))
    if name is None:
        which = "algorithm.adv_estimator" if estimator == "gae" else f"{_ACTOR}.policy_loss.loss_mode"
        done.lose(
            which,
            "gspo has no critic; choose an objective (docs/choosing.md)"
            if estimator == "gae"
            else f"no objective combines loss_mode {mode!r}, loss_agg_mode {aggregate!r}, adv_estimator {estimator!r}",
        )
        return
    done.put("objective.name", name, f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.loss_agg_mode",
             "algorithm.adv_estimator")  # fmt: skip
    if name not in _WITHOUT_SCALE:
        scale = "std" if done.value("algorithm.norm_adv_by_std_in_grpo") else "none"
        if scale != ("none" if name in _CENTERED else "std"):
            done.put("objective.advantage_scale", scale, "algorithm.norm_adv_by_std_in_grpo")
    if name == "rloo":
        done.differences.append("adv_estimator rloo: gspo's rloo has no ratio and sums over the tokens of a completion")
    _trust_region(done, name)
    if name == "dr_grpo":
        length = next(n for n in (f"{_ACTOR}.loss_scale_factor", "data.max_response_length") if done.value(n))
        done.put("objective.max_length", done.number(length, int), length)
    _groups(done, name)
    _kl(done, name)


def _trust_region(done: Conversion, name: str) -> None:
    both = f"{_ACTOR}.clip_ratio"
    low_name, high_name = (
        both if done.has(both) and not done.has(f"{both}_{side}") else f"{both}_{side}" for side in ("low", "high")
    )
    low, high = done.number(low_name), done.number(high_name)
    if name == "cispo":
        done.put("objective.weight_cap", 1 + high, high_name)
        done.differences.append("loss_mode cispo: verl also bounds the ratio from below, by 1 - clip_ratio_low")
    elif name == "sapo":
        done.put("objective.tau_pos", done.number(f"{_ACTOR}.tau_pos"), f"{_ACTOR}.tau_pos")
        done.put("objective.tau_neg", done.number(f"{_ACTOR}.tau_neg"), f"{_ACTOR}.tau_neg")
    elif name == "kl_cov":
        for theirs, ours in (("kl_cov_ratio", "select_fraction"), ("ppo_kl_coef", "cov_kl")):
            done.put(
                f"objective.{ours}", done.number(f"{_ACTOR}.policy_loss.{theirs}"), f"{_ACTOR}.policy_loss.{theirs}"
            )
    elif name not in ("gpg", "rloo"):
        done.put("objective.clip_low", low, low_name)
        done.put("objective.clip_high", high, high_name)
        dual = done.number(f"{_ACTOR}.clip_ratio_c")
        if name in ("grpo", "dapo", "dr_grpo", "reinforce_pp") and dual:
            done.put("objective.dual_clip", dual, f"{_ACTOR}.clip_ratio_c")
        if name == "gspo" and low > 0.05:
            done.differences.append(
                f"clip_ratio = {low:g} clips no sequence ratio, which is near 1; the paper's range is 3e-4 and 4e-4"
            )
    if name == "clip_cov":
        for theirs, ours in (
            ("clip_cov_ratio", "select_fraction"),
            ("clip_cov_lb", "cov_low"),
            ("clip_cov_ub", "cov_high"),
        ):
            done.put(
                f"objective.{ours}", done.number(f"{_ACTOR}.policy_loss.{theirs}"), f"{_ACTOR}.policy_loss.{theirs}"
            )


def _groups(done: Conversion, name: str) -> None:
    """Which groups are trained on, and length shaping."""
    enable, most = "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"
    if done.value(enable):
        done.put("objective.keep", "mixed", enable)
        done.put("rollout.refill_budget", done.number(most, int) or "full", most, enable)
    elif name == "dapo":
        # A part of DAPO that verl switches on by itself.
        done.put("objective.keep", "all", enable)
    buffer = "reward_model.overlong_buffer"
    if done.value(f"{buffer}.enable"):
        done.put("objective.shape", ["soft_overlong"], f"{buffer}.enable")
        if done.has(f"{buffer}.len"):
            done.put("objective.overlong_cache", done.number(f"{buffer}.len", int), f"{buffer}.len")
    elif name == "dapo":
        done.put("objective.shape", [], f"{buffer}.enable")


def _kl(done: Conversion, name: str) -> None:
    in_loss, in_reward = f"{_ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    if done.value(in_loss) and done.value(in_reward):
        done.lose(in_reward, "the KL penalty is in the loss or in the reward, not in both")
    if done.value(in_loss):
        where, switch, size, kind = "loss", in_loss, f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"
    elif done.value(in_reward):
        where, switch, size, kind = "reward", in_reward, "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
    else:
        if name in ("grpo", "reinforce_pp"):
            done.put("objective.kl", 0.0, in_loss)
        return
    done.put("objective.kl", done.number(size), size, switch)
    done.put("objective.kl_in", where, switch)
    estimator = _ESTIMATORS.get(str(done.value(kind)))
    if estimator:
        done.put("objective.kl_estimator", estimator, kind)
    else:
        done.lose(kind, f"there are {', '.join(dict.fromkeys(_ESTIMATORS.values()))}")


def _optimizer(done: Conversion, updates: int, steps: int | None) -> None:
    old, new = f"{_ACTOR}.optim.warmup_style", f"{_ACTOR}.optim.lr_scheduler_type"
    name = old if done.has(old) else new
    kind = str(done.value(name))
    if kind in ("constant", "cosine"):
        done.put("learner.schedule", kind, name)
        if kind == "cosine":
            done.put(
                "learner.final_fraction", done.number(f"{_ACTOR}.optim.min_lr_ratio"), f"{_ACTOR}.optim.min_lr_ratio"
            )
    else:
        done.lose(name, "the schedules are constant, linear and cosine")
    warmup, ratio = f"{_ACTOR}.optim.lr_warmup_steps", f"{_ACTOR}.optim.lr_warmup_steps_ratio"
    if (done.number(warmup) or 0) > 0:
        done.put("learner.warmup_updates", int(done.number(warmup)) * updates, warmup)
    elif done.number(ratio) and steps:
        done.put("learner.warmup_updates", math.ceil(done.number(ratio) * steps) * updates, ratio)
    elif done.number(ratio):
        done.todo.append(f"learner.warmup_updates: {done.number(ratio)} x steps x learner.mini_batches")
    betas = done.value(f"{_ACTOR}.optim.betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        for key, value in zip(("learner.beta1", "learner.beta2"), betas, strict=True):
            done.put(key, value, f"{_ACTOR}.optim.betas")
    done.put("learner.max_grad_norm", done.number(f"{_ACTOR}.grad_clip"), f"{_ACTOR}.grad_clip")
    done.differences.append(SPIKES)


def _model(done: Conversion) -> None:
    if rank := done.number(f"{_MODEL}.lora_rank", int):
        done.put("model.lora.rank", rank, f"{_MODEL}.lora_rank")
        done.put("model.lora.alpha", done.number(f"{_MODEL}.lora_alpha", int), f"{_MODEL}.lora_alpha")
        targets = done.value(f"{_MODEL}.target_modules")
        if targets != "all-linear":
            targets = [targets] if isinstance(targets, str) else list(targets)
            done.put("model.lora.targets", targets, f"{_MODEL}.target_modules")
    replay = {"R2": "old", "R3": "sampler"}.get(str(done.value(f"{_ACTOR}.router_replay.mode")))
    if done.value(f"{_ROLLOUT}.enable_rollout_routing_replay"):
        replay = "sampler"
    if replay:
        done.put("routing.replay", replay, f"{_ACTOR}.router_replay.mode", f"{_ROLLOUT}.enable_rollout_routing_replay")


def _sampling(done: Conversion) -> None:
    done.put("rollout.top_k", max(0, done.number(f"{_ROLLOUT}.top_k", int) or 0), f"{_ROLLOUT}.top_k")
    engine = done.value(f"{_ROLLOUT}.name")
    if engine == "vllm":
        done.put("rollout.engine", "vllm", f"{_ROLLOUT}.name")
    else:
        for key in [k for k in done.settings if k.startswith("rollout.engine_options.")]:
            del done.settings[key]
        if engine not in (None, "hf"):
            done.lose(f"{_ROLLOUT}.name", "the engines are local and vllm; local is used")
    if done.value(f"{_ROLLOUT}.multi_turn.enable"):
        done.lose(f"{_ROLLOUT}.multi_turn.enable", "name an environment in environment.name (docs/environments.md)")
    for key in [k for k in done.settings if k.startswith("environment.")]:
        del done.settings[key]
    correction = "algorithm.rollout_correction"
    if kind := {"token": "token_tis", "sequence": "sequence_tis"}.get(str(done.value(f"{correction}.rollout_is"))):
        done.put("objective.mismatch", kind, f"{correction}.rollout_is")
        done.put("objective.mismatch_high", done.number(f"{correction}.rollout_is_threshold"),
                 f"{correction}.rollout_is_threshold")  # fmt: skip
    if done.value(f"{correction}.bypass_mode"):
        done.put("learner.old_logp", "sampler", f"{correction}.bypass_mode")


def _data(done: Conversion) -> None:
    for theirs, ours in (("data.train_files", "data.path"), ("data.val_files", "data.held_out_path")):
        files = done.value(theirs)
        files = [files] if isinstance(files, str) else list(files or ())
        if len(files) == 1:
            done.put(ours, files[0], theirs)
        elif files:
            where = "[data.mix.NAME]" if theirs == "data.train_files" else "[eval.sets.NAME]"
            done.lose(theirs, f"write a table {where} with its path for each file")
    if done.has("data.seed"):
        done.put("seed", done.number("data.seed", int), "data.seed")
    if done.value("data.filter_overlong_prompts") or str(done.value("data.truncation")) not in ("error", "None"):
        done.put("data.on_bad_row", "skip", "data.filter_overlong_prompts", "data.truncation")
    if str(done.value("data.truncation")) in ("left", "right", "middle"):
        done.differences.append("data.truncation: a prompt that is too long is dropped, not truncated")
    done.put("data.answer_field", "reward_model", "data.reward_fn_key")
    done.differences.append(
        "data: verl's files have the expected answer in reward_model.ground_truth, so a reward function receives "
        "answer[i]['ground_truth']; data.answer_field names the column"
    )
    for section in ("reward.custom_reward_function", "custom_reward_function"):
        if done.has(f"{section}.path"):
            name = done.value(f"{section}.name") or "compute_score"
            done.put(
                "reward.functions", [f"{done.value(f'{section}.path')}:{name}"], f"{section}.path", f"{section}.name"
            )
            done.todo.append(
                f"reward.functions: {name} has verl's signature (data_source, solution_str, ground_truth, extra_info); "
                "wrap it (docs/from-verl.md)"
            )
            return
    done.todo.append("reward.functions: verl chooses a function by data_source; name yours (docs/rewards.md)")


def _run(done: Conversion) -> None:
    done.put_name("trainer.experiment_name")
    if done.has("trainer.default_local_dir"):
        done.put("run_dir", str(done.value("trainer.default_local_dir")), "trainer.default_local_dir")
    if (done.number("trainer.save_freq", int) or 0) > 0:
        done.put("checkpoint.every", done.number("trainer.save_freq", int), "trainer.save_freq")
    every = max(0, done.number("trainer.test_freq", int) or 0)
    done.put("eval.every", every, "trainer.test_freq")
    if not every or "data.held_out_path" not in done.settings:
        # Without evaluations there is nothing to hold out.
        done.settings.pop("data.held_out_path", None)
        done.put("data.held_out", 0, "data.val_files")
    if every and done.number(f"{_ROLLOUT}.val_kwargs.n", int):
        done.put("eval.samples", done.number(f"{_ROLLOUT}.val_kwargs.n", int), f"{_ROLLOUT}.val_kwargs.n")
    done.put_sinks("trainer.logger", project="trainer.project_name", ignored=["console", "file"])
    nodes, gpus = done.number("trainer.nnodes", int) or 1, done.number("trainer.n_gpus_per_node", int) or 1
    if nodes * gpus > 1:
        done.differences.append(
            f"{nodes * gpus} GPUs are no setting: gspo train RECIPE --nproc {nodes * gpus} (docs/scale.md)"
        )
