"""`gspo plan`: its arithmetic against independent formulas and counters, how predictions move, and its output."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from gspo import config as settings
from gspo.cli import main
from gspo.config import Config, LoraConfig
from gspo.errors import ConfigError
from gspo.learner.plan import make_plan
from gspo.model.adapter import attach
from gspo.model.micro_batch import TokenSequence
from gspo.model.quantization import BITS
from gspo.preflight import memory, speed, step_time
from gspo.preflight.calibration import TIMES
from gspo.preflight.gpus import GPUS, gpu_named, gpu_of_device
from gspo.preflight.layouts import Cluster, Request, context_sizes, plan_layouts, rank_counts
from gspo.preflight.model_size import weights_of
from gspo.preflight.workload import Workload, micro_batches

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "examples" / "shapes"
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def skeleton(kind: str = "qwen3", dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **sizes}), dtype=dtype)


def run_config(**learner: Any) -> Config:
    tree = {
        "model": {"path": "somewhere", "dtype": "bfloat16", "compile": "on"},
        "data": {"task": "addition", "held_out": 0},
        "eval": {"every": 0},
        "rollout": {"prompts": 8, "group_size": 4, "max_tokens": 100},
        "learner": {"mini_batches": 2, "micro_batch_tokens": 400, **learner},
    }
    return settings.from_tree(tree, where="test")


def workload(model: Any = None, config: Config | None = None, **fields: Any) -> Workload:
    given = {"prompt_tokens": 20, "completion_tokens": 100, "kl": False, "gpu": True, "packed": True, **fields}
    return Workload(config=config or run_config(), skeleton=model or skeleton(), **given)


# ---- counts


def by_hand(c: dict[str, Any]) -> int:
    """Parameters of a Qwen3 model, from its published config."""
    h, q, k = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    attention = h * q + 2 * h * k + q * h + 2 * c["head_dim"]
    experts = c.get("num_experts", 0)
    feed_forward = experts * (3 * h * c["moe_intermediate_size"] + h) if experts else 3 * h * c["intermediate_size"]
    return c["num_hidden_layers"] * (attention + feed_forward + 2 * h) + h + 2 * c["vocab_size"] * h


@pytest.mark.parametrize(
    ("name", "published", "active"),
    [
        ("qwen3-8b", 8.2e9, 8.2e9),
        ("qwen3-32b", 32.8e9, 32.8e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
    ],
)
def test_parameters_of_known_models(name: str, published: float, active: float) -> None:
    config = AutoConfig.from_pretrained(SHAPES / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = weights_of(model, "")
    assert weights.total == by_hand(json.loads((SHAPES / name / "config.json").read_text()))
    assert weights.total == pytest.approx(published, rel=0.01)
    used = weights.active(memory_shape(model)) + 2 * weights.head
    assert used == pytest.approx(active, rel=0.03)


def memory_shape(model: Any) -> Any:
    return workload(model).shape


def adapted() -> Any:
    model = skeleton()
    with torch.device("meta"):
        attach(model, LoraConfig(rank=4), base="", seed=0)
    return model


def test_adapters_are_counted_apart() -> None:
    plain, found = weights_of(skeleton(), ""), weights_of(adapted(), "")
    h, i, q, k = 64, 160, 64, 32
    widths = 3 * ((h + q) + 2 * (h + k) + (q + h) + 2 * (h + i) + (i + h))
    assert (found.adapter_widths, found.adapters, found.trained) == (widths, 4 * widths, 4 * widths)
    assert (found.dense, found.dense_trained, found.head_trained) == (plain.dense, 0, False)
    assert plain.dense_trained == plain.dense


def counted_flops(work: Callable[[], Any]) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        work()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    sizes = {**SIZES, **(EXPERTS if kind == "qwen3_moe" else {})}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, attn_implementation="eager"))
    prompt, completion = 8, 24
    config = run_config(mini_batches=1, micro_batch_tokens=10**6)
    config = replace(config, rollout=replace(config.rollout, prompts=1, group_size=2, max_tokens=completion))
    work = workload(model, config, prompt_tokens=prompt, completion_tokens=completion, packed=False)
    amounts = speed.training_amounts(work)
    # Four products: the logits, once more in the backward pass, and the gradients of hidden states and weight.
    assert amounts["head"] == 4 * 2 * (2 * completion) * 64 * 96
    tokens = 2 * (prompt + completion)
    if kind == "qwen3_moe":
        # Three matrices of each of two experts, forward and twice backward. The counter does not know their product.
        assert amounts["experts"] == 3 * 2 * tokens * 3 * 2 * (3 * 64 * 48)
        return
    ids = torch.ones(2, prompt + completion, dtype=torch.int64)
    counted = counted_flops(lambda: model.model(input_ids=ids).last_hidden_state.sum().backward())
    attention = sum(n for op, n in counted.items() if "bmm" in op)
    # Eager attention computes every pair, twice as many as attend. The rotary embedding has a small product, too.
    assert attention == pytest.approx(3 * 4 * 3 * 64 * 2 * (prompt + completion) ** 2, rel=0.02)
    assert amounts["products"] == pytest.approx(sum(counted.values()) - attention, rel=0.01)
    two = replace(work, config=replace(config, learner=replace(config.learner, mini_batches=2)))
    # Old log-probs are needed for the second of two updates: a third of the operations of half of the training.
    assert speed.logprob_amounts(two)["products"] == pytest.approx(speed.training_amounts(two)["products"] / 6)


def test_attention_counts_the_pairs_that_attend() -> None:
    work = workload(config=run_config(mini_batches=1, micro_batch_tokens=10**6))
    pairs = sum(
        sum(range(1, 21)) + 4 * sum(20 + i for i in range(1, 101))  # a prompt, and its four completions
        for _ in range(8)
    )
    expected = 3 * 4 * 64 * pairs * (1 + speed.BACKWARD_ATTENTION)
    assert speed.training_amounts(work)["attention"] == pytest.approx(expected, rel=0.02)


def test_the_kv_cache_has_all_tokens_of_all_slots() -> None:
    work = workload()
    lines = {line.name: line for line in memory.estimate(work).phases["sampling"]}
    token = 3 * 2 * (2 * 16) * 2  # layers, keys and values, heads x size, bytes
    # 32 completions in blocks of 64 tokens, prefilled prompts, and two spare blocks.
    assert lines["KV cache"].bytes == (32 * 2 + 2 + 2 * (128 + 2)) * 64 * token
    tight = replace(work, memory=memory.total(memory.estimate(work).held) + 2.5e6)
    assert memory.concurrent(tight) < memory.concurrent(work) == 32


@pytest.mark.parametrize("budget", [130, 400, 1000, 10**6])
@pytest.mark.parametrize("mini_batches", [1, 4])
def test_micro_batches_are_those_of_the_learner(budget: int, mini_batches: int) -> None:
    prompt, completion, group = 20, 100, 4
    config = run_config(mini_batches=mini_batches, micro_batch_tokens=budget)
    rows = [
        TokenSequence(prompt_ids=(i // group,) * prompt, completion_ids=(1,) * completion)
        for i in range(config.rollout.prompts * group)
    ]
    real = make_plan(
        rows,
        [i // group for i in range(len(rows))],
        mini_batches=mini_batches,
        token_budget=budget,
        pad_id=0,
        seed="",
        packed=True,
    ).updates[0]
    expected = micro_batches(workload(config=config), completion)
    assert [m.input_ids.numel() for m in real] == [m.tokens(prompt, completion) for m in expected]


@pytest.mark.parametrize(("mean", "longest"), [(128, 768), (50, 60), (10, 10_000)])
def test_lengths_have_the_given_mean(mean: float, longest: int) -> None:
    rate = speed._end_rate(mean, longest)
    steps = 200_000
    width = longest / steps
    alive = sum(math.exp(-rate * width * (i + 0.5)) * width for i in range(steps))
    assert alive == pytest.approx(mean, rel=1e-3)
    assert speed._end_rate(longest, longest) == 0


# ---- how predictions move


def changed(base: Workload, **learner: Any) -> Workload:
    return replace(base, config=replace(base.config, learner=replace(base.config.learner, **learner)))


def seconds(work: Workload, gpu: str = "h200") -> dict[str, float]:
    return speed.step_time(work, GPUS[gpu]).phases


def test_more_work_takes_more() -> None:
    base = workload(skeleton(hidden_size=512, intermediate_size=2048, vocab_size=4096))
    longer = replace(
        base, completion_tokens=100, config=replace(base.config, rollout=replace(base.config.rollout, max_tokens=200))
    )
    shorter = replace(base, completion_tokens=50)
    for phase in ("training", "sampling"):
        peaks = [memory.estimate(changed(w, micro_batch_tokens=10**6)).peak_of(phase) for w in (base, longer)]
        assert peaks[0] < peaks[1]
    assert all(seconds(shorter)[p] < seconds(base)[p] for p in ("log-probs", "training"))
    assert speed.sampling_amounts(shorter)["products"] < speed.sampling_amounts(base)["products"]
    wide = changed(base, micro_batch_tokens=800)
    assert memory.estimate(wide).peak_of("training") > memory.estimate(base).peak_of("training")
    saved = replace(base, config=replace(base.config, model=replace(base.config.model, gradient_checkpointing=True)))
    lines = [{x.name: x.bytes for x in memory.estimate(w).phases["training"]} for w in (saved, base)]
    assert lines[0]["activations"] < lines[1]["activations"]
    assert seconds(saved)["training"] > seconds(base)["training"]
    assert seconds(replace(base, kl=True))["log-probs"] > seconds(base)["log-probs"]
    assert seconds(base, "b200")["training"] < seconds(base, "h200")["training"] < seconds(base, "a100")["training"]


def test_ranks_divide_what_is_held_and_computed() -> None:
    base = workload(skeleton(hidden_size=512, intermediate_size=2048, vocab_size=4096))
    four = replace(base, ranks=4)
    held = [memory.total(memory.estimate(w).held) for w in (base, four)]
    assert held[1] == pytest.approx(held[0] / 4)
    names = {line.name for line in memory.estimate(four).phases["sampling"]}
    assert "gathered weights" in names
    amounts = [speed.training_amounts(w)["products"] for w in (base, four)]
    assert amounts[1] == pytest.approx(amounts[0] / 4)
    assert speed.useful_operations(four) == pytest.approx(speed.useful_operations(base))
    nf4 = replace(
        four, config=replace(four.config, model=replace(four.config.model, quantize="nf4")), skeleton=adapted()
    )
    assert {x.name: x.bytes for x in memory.estimate(nf4).held}["4-bit weights"] == nf4.weights.dense * BITS / 8
    times = speed.step_time(four, GPUS["h200"])
    assert times.phases["weight gather"] > 0 == speed.step_time(base, GPUS["h200"]).phases["weight gather"]
    slow = speed.step_time(four, GPUS["h200"], per_node=2)
    assert slow.communication["training"] > times.communication["training"]
    context = changed(four, context_parallel=4, micro_batch_tokens=10**6)
    assert not context.compiled
    # A little less, because more completions share a prompt.
    assert 0.9 * amounts[1] < speed.training_amounts(context)["products"] < amounts[1]


def test_every_amount_has_a_constant() -> None:
    for model in (skeleton(), skeleton("qwen3_moe", **EXPERTS)):
        for work in (workload(model), workload(model, ranks=2)):
            time = speed.step_time(work, GPUS["h200"])
            for phase, amounts in time.amounts.items():
                assert not set(amounts) - set(TIMES.get(speed.kind_of(phase), {})), phase


# ---- layouts


def test_layouts() -> None:
    assert rank_counts(6) == [1, 2, 4, 6]
    assert rank_counts(1) == [1]
    assert context_sizes(8, 12) == [1, 2, 4]
    request = Request(
        config=run_config(),
        cluster=Cluster(gpu=GPUS["h200"], gpus=2),
        prompt_tokens=20,
        completion_tokens=100,
        kl=False,
        lora_rank=4,
    )

    def built(config: Config) -> Any:
        return adapted() if config.model.lora.rank else skeleton()

    plans = plan_layouts(request, built)
    assert len(plans) == len({plan.name for plan in plans}) == 3 * 2 * 3
    assert [p.time.total for p in plans] == sorted(p.time.total for p in plans)
    assert all(plan.fits and not plan.obstacle for plan in plans)
    # A GPU with too little memory for the given micro-batches gets smaller ones, as far as that helps.
    training = min(memory.total(p.need.held) + memory.total(p.need.phases["training"]) for p in plans)
    small = replace(GPUS["h200"], memory=0.9 * training)
    tight = plan_layouts(replace(request, cluster=Cluster(gpu=small, gpus=2)), built)
    assert min(plan.settings["learner.micro_batch_tokens"] for plan in tight) < 400
    assert not tight[-1].fits
    assert "usable" in tight[-1].obstacle


def test_settings_of_a_layout_are_valid(capsys: Any) -> None:
    assert main(["plan", str(SHAPES / "qwen3-8b"), "--gpu", "h100", "--json", *LENGTHS]) == 0
    plan = json.loads(capsys.readouterr().out)
    for layout in plan["layouts"]:
        given = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in layout["settings"].items()
        ]
        settings.override({"data": {"task": "addition"}, "model": {"path": "x"}}, given, where="test")


# ---- the command

LENGTHS = ("--prompt-tokens=512", "--max-tokens=1024", "--prompts=16")


def test_a_plan_as_text(capsys: Any) -> None:
    assert main(["plan", str(SHAPES / "qwen3-8b" / "config.json"), "--gpus=8", *LENGTHS]) == 0
    out = capsys.readouterr().out
    assert "8.191B parameters, on 8 x h200" in out
    for text in ("Fastest layout: ", "bottleneck: ", "KV cache", "learner.micro_batch_tokens = ", "--nproc 8"):
        assert text in out
    for text in ("offload and 8-bit AdamW on several ranks: ", "GSPO_UNTESTED_NCCL=1", "fitted on one H200"):
        assert text in out


def test_a_model_that_fits_nowhere(capsys: Any) -> None:
    assert main(["plan", str(SHAPES / "qwen3-30b-a3b"), "--gpus=4", "--nodes=2", "--gpu=rtx4090", *LENGTHS]) == 1
    out = capsys.readouterr().out
    assert "Nothing fits. The weights alone take " in out
    assert "expert parallelism: " in out
    assert "Nothing was measured on rtx4090" in out


def test_a_plan_of_a_recipe(capsys: Any) -> None:
    assert main(["plan", "--recipe=demo", "--json", "--rollout.prompts=4"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["layouts"][0]["settings"]["rollout.prompts"] == 4
    assert plan["parameters"] < 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--gpu=h9000"], "--gpu: 'h9000' is not known; choose a100"),
        (["x", "--gpus=6", "--nodes=4"], "--nodes: 6 GPUs cannot be divided among 4 nodes"),
        ([], "give a model, or a recipe"),
        ([str(ROOT / "README.md")], "give a hub name, a directory with a config.json"),
        ([str(SHAPES)], "has no config.json"),
        ([str(SHAPES / "qwen3-8b"), "--mean-tokens=300"], "--mean-tokens: 300 is more than"),
        ([str(SHAPES / "qwen3-8b"), "--rollout.engine=vllm"], "rollout.engine: only engines with the learner's own"),
        ([str(SHAPES / "qwen3-8b"), "--ranks.sampling_weights=layers"], "ranks.sampling_weights: "),
        ([str(SHAPES / "qwen3-8b"), "--rollout.max_lag=1"], "rollout.max_lag: "),
        ([str(SHAPES / "qwen3-8b"), "--rollout.prompt=3"], "rollout.prompt"),
    ],
)
def test_errors_of_the_command(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_data_sheets() -> None:
    assert gpu_named("H200") is GPUS["h200"]
    assert gpu_of_device("NVIDIA H200") is GPUS["h200"]
    assert gpu_of_device("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_of_device("AMD Instinct MI300X") is None
    with pytest.raises(ConfigError, match="--gpu"):
        gpu_named("tpu")


# ---- the doctor


def test_the_doctor_scales_times_on_a_known_gpu(
    tiny: Callable[..., Config], examined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = examined(tiny("rollout.prompts=40"), "tokenizer", "model files", "data", "objective").context
    context.groups = []
    context.timings = step_time.Timings(completions=4, rollout_s=1.0, reward_s=0.0, trained=4, train_s=1.0)
    (on_cpu,) = step_time.check_time(context)
    assert on_cpu.numbers["step_s"][0] < on_cpu.numbers["step_s"][1]
    context.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    (finding,) = step_time.check_time(context)
    assert finding.numbers["step_s"][0] == finding.numbers["step_s"][1]
    assert any("optimizer steps" in line and "predicted for h200" in line for line in finding.detail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "unknown")
    (unknown,) = step_time.check_time(context)
    assert unknown.numbers["step_s"] == on_cpu.numbers["step_s"]


# ---- the benchmark


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("plan_cases", "plan_gpu", "plan_measured", "plan_fit")
    yield SimpleNamespace(**{name.removeprefix("plan_"): importlib.import_module(name) for name in names})  # type: ignore[misc]
    for name in names:
        sys.modules.pop(name, None)


def test_the_benchmark_measures_every_phase(benchmarks: SimpleNamespace, capsys: Any) -> None:
    line = benchmarks.gpu.measure(benchmarks.cases.TINY[1], "cpu", 1)
    assert set(line["runs"][0]["phases"]) == set(benchmarks.gpu.PHASES)
    assert line["runs"][0]["applied"] == [True]
    assert line["runs"][0]["computed_tokens"] == 2 * 8 + 4 * 16
    result = {"device": {"name": "cpu"}, "cases": [line, {**line, "runs": [], "error": "broken"}]}
    (found,) = benchmarks.fit.from_file(result)
    assert set(found.seconds) == set(benchmarks.gpu.PHASES)
    assert "broken" in capsys.readouterr().out


def test_the_fit_finds_the_constants(benchmarks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that another set of constants predicts lead back to about that set."""
    chosen = [m for m in benchmarks.measured.MEASURED if m.fitted and m.case.model == "0.6B"]

    def predicted() -> list[dict[str, float]]:
        times = [benchmarks.fit.predict(m, GPUS["h200"])[1] for m in chosen]
        return [
            {phases: benchmarks.fit.predicted_seconds(m, time, phases) for phases in m.seconds}
            for m, time in zip(chosen, times, strict=True)
        ]

    with monkeypatch.context() as patch:
        for kind, constants in TIMES.items():
            patch.setitem(TIMES, kind, {name: 1.4 * x for name, x in constants.items()})
        slower = predicted()
    found = benchmarks.fit.fit([replace(m, seconds=s) for m, s in zip(chosen, slower, strict=True)], GPUS["h200"])
    for kind in TIMES:
        monkeypatch.setitem(TIMES, kind, found[kind])
    for after, true in zip(predicted(), slower, strict=True):
        assert after == pytest.approx(true, rel=0.05)


def test_predictions_for_the_measured_shapes(benchmarks: SimpleNamespace) -> None:
    """The targets of the documentation, for what was not used for the fit."""
    held_out = [m for m in benchmarks.measured.MEASURED if not m.fitted]
    assert len(held_out) >= 6
    for measured in held_out:
        need, time = benchmarks.fit.predict(measured, GPUS["h200"])
        for phases, real in measured.seconds.items():
            assert benchmarks.fit.predicted_seconds(measured, time, phases) == pytest.approx(real, rel=0.3)
        for phase, size in measured.extra.items():
            assert memory.total(need.phases[phase]) == pytest.approx(size, rel=0.15)
        if measured.peak:
            assert need.peak == pytest.approx(measured.peak, rel=0.15)


# ---- optimizers that need less GPU memory


def test_where_optimizer_states_are_and_how_large() -> None:
    """Bytes per weight: 2 weight, 4 master, 8 or 2.03 moments; and 4 gradient."""
    plain = workload(skeleton(hidden_size=512, intermediate_size=2048))
    count = plain.weights.trained

    def sizes(work: Workload) -> tuple[float, float]:
        need = memory.estimate(work)
        return memory.total(need.held) / count, memory.total(need.host) / count

    others = {tuple(memory.optimizer_settings(w.config.learner)): w for w in memory.cheaper_optimizers(plain)}
    eight, offload = ("learner.optimizer",), ("learner.optimizer_offload",)
    assert sizes(plain) == (14, 0)
    assert sizes(others[eight]) == pytest.approx((8.03, 0), abs=0.01)
    assert sizes(others[offload]) == (2, 12)
    assert sizes(others[eight + offload]) == pytest.approx((2, 6.03), abs=0.01)
    updates = {key: memory.estimate(w).phases["the optimizer step"] for key, w in others.items()}
    assert [line.name for line in updates[eight]] == ["gradients"]
    assert updates[offload][1].bytes <= 12 * count
    assert not list(memory.cheaper_optimizers(replace(plain, ranks=2)))
    assert len(list(memory.cheaper_optimizers(replace(plain, gpu=False)))) == 1, "a CPU has nowhere to move states to"


def test_cheaper_optimizers_are_planned_where_the_plain_one_does_not_fit(capsys: Any) -> None:
    assert main(["plan", str(SHAPES / "qwen3-8b"), "--gpu=h200", "--json", *LENGTHS]) == 0
    layouts = {layout["name"]: layout for layout in json.loads(capsys.readouterr().out)["layouts"]}
    assert not layouts["1 GPU, full"]["fits"]
    eight, offload = layouts["1 GPU, full, 8-bit AdamW"], layouts["1 GPU, full, offload"]
    assert eight["fits"]
    assert offload["fits"]
    assert eight["settings"]["learner.optimizer"] == "adamw_8bit"
    assert offload["settings"]["learner.optimizer_offload"] is True
    assert sum(line["bytes"] for line in offload["memory"]["host"]) == pytest.approx(12 * 8.19e9, rel=0.01)
    assert offload["seconds"]["optimizer"] > layouts["1 GPU, full"]["seconds"]["optimizer"]
    assert not [name for name in layouts if "LoRA" in name and "AdamW" in name]
