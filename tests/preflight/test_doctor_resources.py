"""Memory, disk and time: estimates against measurements, and against machines that are too small."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examination import SAMPLED
from transformers import AutoConfig, AutoModelForCausalLM

from gspo.config import Config
from gspo.learner.forward import completion_logprobs
from gspo.learner.plan import make_plan
from gspo.model import free_memory
from gspo.model.lm_head import lm_head
from gspo.model.load import char_tokenizer
from gspo.model.micro_batch import TokenSequence
from gspo.preflight import disk, machine, memory, memory_check, model, ratio, sampling, step_time
from gspo.preflight.context import Timings
from gspo.preflight.model_size import shape_of
from gspo.types import Completion, Group, Prompt, Score, Status, StopReason

PLAN = ("tokenizer", "model files", "data", "objective")


# ------------------------------------------------------------------------------------------------- memory measured


def peak_bytes(work: Callable[[], Any]) -> int:
    """Peak of the allocated bytes, relative to the start."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events: Any = profiler.profiler
    changes = sorted((e.start_ns(), e.nbytes()) for e in events.kineto_results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, size in changes:
        now += size
        peak = max(peak, now)
    return peak


SIZES = {
    "hidden_size": 96,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
WIDE = {**SIZES, "vocab_size": 8000}
EXPERTS = {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 80}


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype", "checkpointing"),
    [
        ("llama", SIZES, torch.float32, False),
        ("qwen3", WIDE, torch.float32, False),
        ("qwen3", SIZES, torch.bfloat16, False),
        ("qwen3", WIDE, torch.bfloat16, False),
        ("qwen3", SIZES, torch.float32, True),
        ("qwen3_moe", EXPERTS, torch.float32, False),
    ],
)
def test_the_memory_of_training_is_estimated_within_a_factor_of_two(
    kind: str, sizes: dict[str, int], dtype: torch.dtype, checkpointing: bool
) -> None:
    net = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=dtype).eval()
    if checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        net.train()
    prompt, completion, count = 16, 48, 8
    rows = [TokenSequence(prompt_ids=(1,) * prompt, completion_ids=(2,) * completion)] * count
    micro = make_plan(rows, range(count), mini_batches=1, token_budget=10**6, pad_id=0, seed="").updates[0][0]

    def train() -> None:
        logp_N, _ = completion_logprobs(net, micro, 1.0)
        (-logp_N.mean()).backward()

    train()  # allocates the gradients, so that only activations and logits are new below
    measured = peak_bytes(train)
    shape = shape_of(net)
    width = prompt + completion
    activations = count * width * memory.activation_bytes(shape, dtype.itemsize, width, checkpointing=checkpointing)
    estimated = activations + count * completion * shape.vocabulary * memory.LOGIT_BYTES
    assert 0.5 < estimated / measured < 2, f"estimated {estimated / 1e6:.2f} MB, measured {measured / 1e6:.2f} MB"


def test_only_part_of_the_logits_is_in_memory(tiny: Callable[..., Config], examined: Any) -> None:
    context = examined(tiny(), *SAMPLED, "ratio", value=lambda g, i: 0.0).context
    assert memory.logits_held(context.workload, 10) == 10 * context.workload.shape.vocabulary
    with torch.device("meta"):
        large = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **WIDE))
    assert memory.logits_held(dataclasses.replace(context.workload, skeleton=large), 10**4) == memory.HELD_CPU
    gemma = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **SIZES, query_pre_attn_scalar=8)).eval()
    with pytest.warns(RuntimeWarning, match="changes its logits"):
        lm_head(gemma)
    context.policy = dataclasses.replace(context.policy, model=gemma)
    assert memory.logits_held(context.workload, 10**4) == 10**4 * context.workload.shape.vocabulary


def test_what_autograd_keeps_is_measured_on_the_batch(tiny: Callable[..., Config], examined: Any) -> None:
    for build in ("tiny_dense", "tiny_moe"):
        context = examined(tiny(f"model.build={build}"), *SAMPLED, "ratio", value=lambda g, i: float(i % 2)).context
        shape = shape_of(context.skeleton)
        estimated = memory.activation_bytes(shape, 4, 20, checkpointing=False)
        assert context.activation_bytes is not None
        assert 0.5 < estimated / context.activation_bytes < 2
        assert "measured" in memory.estimate(context.workload).phases["training"][1].how


def test_the_kv_cache_is_counted_in_full(tiny: Callable[..., Config], examined: Any) -> None:
    context = examined(tiny("rollout.max_tokens=100"), *PLAN).context
    line = memory.estimate(context.workload).phases["sampling"][0]
    rows, columns = 16, context.longest_prompt + 100
    assert line.bytes == rows * columns * 2 * 2 * (2 * 16) * 4  # layers, keys and values, heads x head_dim, float32


# ------------------------------------------------------------------------------------------------- memory judged


def with_memory(monkeypatch: Any, free: float) -> None:
    monkeypatch.setattr(model, "free_memory", lambda device: (int(free), int(64e9)))


def test_enough_memory_passes(tiny: Callable[..., Config], examined: Any) -> None:
    finding = examined(tiny(), *PLAN, "memory").only("memory")
    assert finding.level == "ok"
    assert any("optimizer moments" in line and "2 x 4 bytes per weight" in line for line in finding.detail)
    assert finding.numbers["total"] >= finding.numbers["free"] > finding.numbers["need"] > 0


def test_too_little_memory_fails_and_the_remedy_helps(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any
) -> None:
    config = tiny("rollout.prompts=64", "rollout.max_tokens=50")
    need = examined(config, *PLAN, "memory").only("memory").numbers["need"]
    with_memory(monkeypatch, need / 2)
    finding = examined(config, *PLAN, "memory").only("memory")
    assert finding.level == "FAIL"
    tokens = int(finding.do.split("learner.micro_batch_tokens = ")[1].split(";")[0])
    learner = dataclasses.replace(config.learner, micro_batch_tokens=tokens)
    after = examined(dataclasses.replace(config, learner=learner), *PLAN, "memory").only("memory")
    assert after.level == "ok"
    assert after.numbers["need"] > need / 5, "the remedy should not be needlessly small"
    with_memory(monkeypatch, need / 0.9)
    assert examined(config, *PLAN, "memory").levels("memory") == ["warning"]


def test_on_a_gpu_a_run_would_split_its_micro_batches(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any
) -> None:
    config = tiny("rollout.prompts=64", "rollout.max_tokens=50")
    found = examined(config, *PLAN, "memory")
    need = found.only("memory").numbers["need"]
    with_memory(monkeypatch, need / 2)
    context = examined(config, *PLAN).context
    context.device = torch.device("cuda")
    assert [f.level for f in memory_check.check_memory(context)] == ["warning"]
    context.free = (int(1e5), int(64e9))
    assert [f.level for f in memory_check.check_memory(context)] == ["FAIL"]


def test_a_cheaper_optimizer_is_proposed_where_it_fits(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any
) -> None:
    options = (
        "model.build_options.hidden_size=4096",
        "model.dtype=float16",
        "rollout.prompts=1",
        "rollout.group_size=2",
    )
    context = examined(tiny(*options, "learner.mini_batches=1", "rollout.max_tokens=4"), *PLAN).context
    context.device = torch.device("cuda")
    weights = context.workload.weights.total
    plain = memory.estimate(context.workload)
    smaller = [memory.estimate(other).peak for other in memory.cheaper_optimizers(context.workload)]
    assert max(smaller) < plain.peak

    def remedy(room: float) -> str:
        context.free = (int(room / memory_check.TIGHT) + 1, int(64e9))
        (finding,) = memory_check.check_memory(context)
        return finding.do

    all_fit = remedy(max(smaller))
    assert all_fit.startswith("Weights, gradients and optimizer alone take ")
    for text in (
        'use learner.optimizer = "adamw_8bit" (needs ',
        "learner.optimizer_offload = true (needs ",
        'learner.optimizer = "adamw_8bit" with learner.optimizer_offload = true (needs ',
        " of host memory), more memory",
    ):
        assert text in all_fit
    assert "learner.optimizer" not in remedy(2.0 * weights), "none of them fits"
    learner = dataclasses.replace(context.config.learner, optimizer_offload=True)
    context.config = dataclasses.replace(context.config, learner=learner)
    monkeypatch.setattr(memory_check, "free_memory", lambda device: (15 * weights, 64 * weights))
    assert next(iter(memory_check.check_memory(context))).level == "ok"
    monkeypatch.setattr(memory_check, "free_memory", lambda device: (11 * weights, 64 * weights))
    host = next(iter(memory_check.check_memory(context)))
    assert (host.level, host.numbers["host_need"]) == ("FAIL", 12 * weights)
    assert 'learner.optimizer = "adamw_8bit"' in host.do


def test_an_optimizer_that_cannot_work_is_a_failure(tiny: Callable[..., Config], examined: Any) -> None:
    found = examined(tiny("learner.optimizer_offload=true"), *PLAN)
    assert found.levels("model files") == ["FAIL"]


def test_a_model_that_does_not_fit_is_not_loaded(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("gspo.build.load_policy", lambda *args, **options: loaded.append("loaded"))
    with_memory(monkeypatch, 1000)
    found = examined(tiny(), *PLAN, "model", "memory")
    assert found.levels("model") == ["FAIL"]
    assert found.levels("memory") == ["FAIL"]
    assert "alone take" in found.only("memory").do
    assert not loaded


def test_sampling_and_training_that_would_run_out_of_memory_are_refused(
    tiny: Callable[..., Config], examined: Any, monkeypatch: Any
) -> None:
    def with_free(size: int) -> None:
        for module in (sampling, ratio):
            monkeypatch.setattr(module, "free_memory", lambda device: (size, 2 * size))

    found = examined(tiny(), *SAMPLED, value=lambda g, i: float(i % 2))
    with_free(1000)
    assert [f.level for f in sampling.check_sampling(found.context)] == ["FAIL"]
    assert [f.level for f in ratio.check_ratio(found.context)] == ["FAIL"]
    assert [f.level for f in ratio.check_temperature(found.context)] == ["note"]
    with_free(3_000_000)
    assert [f.level for f in ratio.check_ratio(found.context)] == ["note", "ok"], "smaller micro-batches fit"


def test_a_container_s_limit_counts(tmp_path: Path, monkeypatch: Any) -> None:
    for name, number in {"memory.max": 10**9, "memory.current": 4 * 10**8}.items():
        (tmp_path / name).write_text(f"{number}\n")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    free, total = free_memory.free_memory(torch.device("cpu"))
    assert (free, total) == (6 * 10**8, 10**9)


def test_precision_and_reference_are_counted(tiny: Callable[..., Config], examined: Any) -> None:
    def held(*overrides: str) -> dict[str, float]:
        context = examined(tiny(*overrides), *PLAN).context
        return {line.name: line.bytes for line in memory.estimate(context.workload).held}

    full, half = held(), held("model.dtype=bfloat16", "objective.name=grpo")
    assert half["weights"] == full["weights"] / 2
    assert half["float32 masters"] == full["weights"]
    assert half["reference model"] == half["weights"]
    assert "float32 masters" not in full
    assert full["optimizer moments"] == half["optimizer moments"] == 2 * full["weights"]
    ahead = held("rollout.max_lag=1")
    assert ahead["sampling process"] == full["weights"]
    assert ahead["KV cache"] > 0
    assert held("rollout.max_lag=1", "rollout.sampler_device=cuda:1") == full


def test_adapters_and_four_bits_are_counted(tiny: Callable[..., Config], examined: Any, tmp_path: Path) -> None:
    from gspo.learner.checkpoint import size_of
    from gspo.model.load import load_policy, load_tokenizer

    shape = AutoConfig.for_model("qwen3", **{**SIZES, "hidden_size": 128, "eos_token_id": 1})
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    char_tokenizer("sort 0123456789").save_pretrained(tmp_path / "model")
    saved = ("model.build=", f"model.path={tmp_path / 'model'}", "model.dtype=bfloat16")
    common = (*saved, "model.lora.rank=2", "objective.name=grpo")
    for quantize in ("", "nf4"):
        config = tiny(*common, f"model.quantize={quantize}")
        context = examined(config, *PLAN).context
        held = {line.name: line.bytes for line in memory.estimate(context.workload).held}
        loaded = load_policy(config.model, load_tokenizer(config.model), seed=0).model
        trained = sum(p.numel() for p in loaded.parameters() if p.requires_grad)
        assert (held["optimizer moments"], held["float32 masters"]) == (8 * trained, 4 * trained)
        assert "reference model" not in held
        assert disk.checkpoint_bytes(context) == size_of(loaded, "adamw")
        real = sum(p.numel() * p.element_size() for p in loaded.parameters())
        assert held["weights"] == pytest.approx(real, rel=0.04)  # the scales of 4-bit weights (3 %) are not parameters


# ------------------------------------------------------------------------------------------------- disk


def test_disk(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    config = tiny("checkpoint.keep=2")
    passing = examined(config, *PLAN, "disk").only("disk")
    assert passing.level == "ok"
    need, usage = passing.numbers["need"], shutil.disk_usage("/")
    assert need > 3 * passing.numbers["checkpoint"]
    levels = []
    for free in (1.3 * need, 1.1 * need, 0.9 * need):
        monkeypatch.setattr(shutil, "disk_usage", lambda place, free=free: usage._replace(free=int(free)))
        levels.append(examined(config, *PLAN, "disk").only("disk").level)
    assert levels == ["ok", "warning", "FAIL"]


def test_estimated_sizes_on_disk_match_a_run(
    tiny: Callable[..., Config], examined: Any, display: Any, monkeypatch: Any
) -> None:
    from gspo.trainer import train

    config = tiny("model.dtype=bfloat16", "rollout.prompts=16", "steps=1", "eval.every=1")
    context = examined(config, *SAMPLED, "objective", value=lambda g, i: 0.0).context
    run = train(config, display).run
    written = sorted((run / "checkpoints").iterdir())
    size = sum(f.stat().st_size for f in written[-1].iterdir() if f.suffix in (".safetensors", ".tensors"))
    assert disk.checkpoint_bytes(context) == pytest.approx(size, rel=0.1)
    assert len(written) <= disk.checkpoints(context)
    logged = (run / "rollouts" / "000001.jsonl").stat().st_size
    assert 0.5 < disk.rollout_bytes(context) / logged < 2
    evaluated = sum(file.stat().st_size for file in (run / "evaluations").iterdir())
    assert 0.5 < disk.evaluation_bytes(context) / evaluated < 2


def test_a_checkpoint_of_a_run_with_a_lag_may_have_older_weights(tiny: Callable[..., Config], examined: Any) -> None:
    contexts = [examined(tiny(f"rollout.max_lag={lag}"), *PLAN).context for lag in (0, 1, 3)]
    sizes = [disk.checkpoint_bytes(context) for context in contexts]
    weights = sum(p.numel() * p.element_size() for p in contexts[0].skeleton.parameters())
    assert sizes == [sizes[0], sizes[0] + weights, sizes[0] + 3 * weights]
    lines = examined(tiny("rollout.max_lag=3"), *PLAN, "disk").only("disk").detail
    assert "up to 3 of older weights for rollout.max_lag" in lines[0]


def test_the_number_of_checkpoints_on_disk(tiny: Callable[..., Config], examined: Any) -> None:
    def count(*overrides: str) -> int:
        return disk.checkpoints(examined(tiny(*overrides), "objective").context)

    assert count("steps=100", "checkpoint.every=10", "checkpoint.keep=2") == 3
    assert count("steps=100", "checkpoint.every=10", "checkpoint.keep=0") == 12
    assert count("steps=100", "checkpoint.every=10", "checkpoint.keep=2", "objective.name=grpo") == 4


def test_rollbacks_keep_the_completions_of_abandoned_steps(tiny: Callable[..., Config], examined: Any) -> None:
    def need(*overrides: str) -> float:
        config = tiny("steps=100", "checkpoint.every=10", "checkpoint.keep=5", *overrides)
        finding = examined(config, *PLAN, "disk").only("disk")
        return float(finding.numbers["need"] - finding.numbers["checkpoint"] * finding.numbers["checkpoints"])

    rollback = ("alarms.rollback=repetition", "alarms.steps=4")
    plain = need()
    assert plain > 0
    # Each rollback abandons the steps of the alarm and those back to a checkpoint: 4 + 1 + 10.
    assert need(*rollback, "alarms.max_rollbacks=2") == pytest.approx(1.3 * plain, rel=1e-3)
    assert need(*rollback, "alarms.max_rollbacks=4") == pytest.approx(1.6 * plain, rel=1e-3)


def test_the_run_directory(tiny: Callable[..., Config], examined: Any, tmp_path: Path, monkeypatch: Any) -> None:
    config = tiny()
    assert examined(config, "run directory").levels("run directory") == ["ok"]
    assert not Path(config.run_dir).exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    assert "not empty" in examined(config, "run directory").only("run directory").what
    (tmp_path / "run" / "config.toml").write_text("")
    finding = examined(config, "run directory").only("run directory")
    assert (finding.level, "already holds a run" in finding.what) == ("FAIL", True)
    monkeypatch.setattr("os.access", lambda *args: False)
    assert examined(tiny(run_dir="other"), "run directory").levels("run directory") == ["FAIL"]


# ------------------------------------------------------------------------------------------------- time


def group(rewards: list[float]) -> Group:
    prompt = Prompt(id="p", content="p", text="p", token_ids=(1,))
    completion = Completion(
        prompt_id="p", sample=0, token_ids=(1, 2), text="", logp_sampler=(0.0, 0.0), stop=StopReason.EOS, version=0
    )
    scores = [Score(status=Status.SCORED, reward=r, correct=r > 0.5) for r in rewards]
    return Group(prompt=prompt, completions=[completion] * len(rewards), scores=scores)


def test_time_is_scaled_to_a_step_and_a_run(tiny: Callable[..., Config], examined: Any) -> None:
    rollout = ("rollout.prompts=40", "rollout.group_size=10", "rollout.engine_options.slots=100")
    config = tiny(*rollout, "steps=100", "eval.every=50")
    context = examined(config, *PLAN).context
    context.groups = [group([0.0, 1.0])]
    context.timings = Timings(completions=40, rollout_s=2.0, reward_s=0.4, trained=20, train_s=3.0)
    (finding,) = step_time.check_time(context)
    low, high = finding.numbers["step_s"]
    assert finding.numbers["reward_s"] == pytest.approx(4.0)  # ten times as many completions
    assert finding.numbers["learn_s"] == pytest.approx(60.0)
    assert low == pytest.approx(4 * 2.0 + 64)  # four rounds of a hundred slots
    assert high == pytest.approx(10 * 2.0 + 64)
    assert finding.numbers["evaluation_s"] == pytest.approx(2.4 / 40 * 8 * 2)
    assert "about 2 h" in finding.what.replace("2.0 h", "2 h").replace("2.3 h", "2 h")


def test_refills_and_references_take_time(tiny: Callable[..., Config], examined: Any) -> None:
    def step(*overrides: str) -> Any:
        context = examined(tiny(*overrides), *PLAN).context
        context.groups = [group([0.0, 1.0]), group([0.0, 0.0])]
        context.timings = Timings(completions=16, rollout_s=1.0, reward_s=0.5, trained=16, train_s=1.0)
        (finding,) = step_time.check_time(context)
        return finding.numbers["step_s"][1]

    plain = step()
    assert step("objective.name=dapo") == pytest.approx(plain + 1.5)
    assert step("objective.name=grpo") == pytest.approx(plain + 0.25)


def test_durations() -> None:
    shown = [step_time.duration(s) for s in (0.0123, 3.42, 42, 130, 7300, 1e6)]
    assert shown == ["12 ms", "3.4 s", "42 s", "2.2 min", "2 h", "12 days"]


@pytest.mark.parametrize(
    ("limit", "used", "stat"),
    [
        ("memory.max", "memory.current", "anon 5\ninactive_file {cache}\nactive_file 100\n"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "inactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 100\n",
        ),
    ],
)
def test_page_cache_of_a_container_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, used: str, stat: str
) -> None:
    """After a model was read, the usage of a container is at its limit, and nearly all of it is page cache."""
    most, cache = 1 << 30, 900 << 20
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text(f"{most}\n")
    (tmp_path / used).write_text(f"{most - 4096}\n")
    (tmp_path / used).with_name("memory.stat").write_text(stat.format(cache=cache))
    (tmp_path / "meminfo").write_text(f"MemAvailable: {1 << 40} kB\n")
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(free_memory, "PROC", tmp_path)
    assert free_memory.free_memory(torch.device("cpu")) == (4096 + cache + 100, most)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (6100, "102 min"),
        (0.0999, "100 ms"),
        (150 * 86400, "150 days"),
        (0.012, "12 ms"),
        (3.44, "3.4 s"),
        (7.5 * 3600, "7.5 h"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float, text: str) -> None:
    assert step_time.duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(999.7e6, "1000 MB"), (1.5e9, "1.5 GB"), (340e6, "340 MB"), (2.5e15, "2500 TB")]
)
def test_sizes_read_as_people_write_them(size: float, text: str) -> None:
    assert machine.human(size) == text
