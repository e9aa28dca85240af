"""Runs with an environment: what they record, that a resume and a replay repeat them, and that observations are only
read, never trained on."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from ends import same_end
from sampling_stand_in import stand_in
from simulated_vllm import SimulatedVllm
from tiny_runs import tiny_tree

from gspo import config as settings
from gspo.cli import main
from gspo.config import Config
from gspo.context import RunContext
from gspo.environment.setup import RunEnvironment
from gspo.environment.tool_calls import ToolCall, write
from gspo.errors import ConfigError, EngineError
from gspo.evaluation import evaluate
from gspo.learner.batch import prepare_batch
from gspo.objectives.samples import train_samples
from gspo.preflight.context import PreflightContext
from gspo.preflight.examine import CHECKS, run_checks
from gspo.preflight.findings import Level
from gspo.ranks.codec import decode, encode
from gspo.record.ledger import read_ledger
from gspo.record.metric_definitions import METRICS
from gspo.record.run_dir import read_jsonl
from gspo.rollout.engine import EngineContext, GenerateOptions
from gspo.rollout.engines.local import LocalEngine
from gspo.rollout.engines.vllm import VllmEngine
from gspo.step import learn
from gspo.trainer import resume, train
from gspo.trust import all_code
from gspo.types import Completion, Conversation, ConversationEnd, Group, Prompt, Score, Status, StopReason, Turn
from gspo.view.completions import Completions
from gspo.view.run_reader import RunReader

GAME = """
from gspo.environment import Environment

class Game(Environment):
    "Random models never solve anything, so the reward is for what varies."
    def reset(self, row):
        self.steps = 0

    def step(self, message):
        self.steps += 1
        size = len(message["content"]) + 0.01 * self.rng.random()
        return f"{self.rng.randint(0, 9)}", float(size), self.steps == 1 + len(message["content"]) % 2
"""


@pytest.fixture
def game(tmp_path: Path) -> Callable[..., Config]:
    (tmp_path / "game.py").write_text(GAME)

    def build(*overrides: str, run_dir: str = "run") -> Config:
        tree: dict[str, Any] = tiny_tree(tmp_path / run_dir)
        del tree["reward"]["functions"]
        tree["rollout"]["max_tokens"] = 40
        tree["environment"] = {
            "name": f"{tmp_path}/game.py:Game",
            "turn_tokens": 8,
            "max_turns": 3,
            # Rounds of sampling must not depend on the speed of the machine: this run is compared bitwise.
            "patience_s": 600.0,
        }
        config = settings.override(tree, overrides, where="test")
        settings.check(config)
        return config

    return build


def test_a_run_resumes_bitwise_and_its_record_shows_the_turns(
    game: Callable[..., Config], tmp_path: Path, display: Any
) -> None:
    train(game("objective.name=gspo_turn"), display=display)
    train(game("objective.name=gspo_turn", "steps=2", run_dir="part"), display=display)
    resume(tmp_path / "part", display, steps=3)
    whole, part = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "part"))
    assert whole == part
    metrics = [json.loads(line) for line in whole.splitlines()]
    assert all(row["conversation/turns"] > 1 for row in metrics if row["step"])
    # Turns in another format are counted only if there are any.
    always = [m.key for m in METRICS if m.key.startswith("conversation/") and "if there are" not in m.present]
    names = {key.replace("/NAME", "/turns") for key in always}
    assert len(names) > 5
    assert all(names <= set(row) for row in metrics if row["step"])
    assert all(row["conversation/reused_fraction"] > 0 for row in metrics if row["step"])

    shown = Completions(tmp_path / "run")
    records = shown.of(3)
    turns = next(r for r in records if len(r["turns"]) > 1)["turns"]
    assert turns[0]["start"] == 0
    assert turns[0]["end"] < turns[1]["start"]
    mixed = [r for r in records if r["trained"]]
    assert mixed
    for group, members in enumerate(shown.groups(3)):
        for number, _ in enumerate(members["completions"]):
            one = shown.completion(3, group, number)
            assert one is not None
            given = [i for i, own in enumerate(one.get("sampled") or []) if not own]
            assert all(one["logp_sampler"][i] is None for i in given)


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/environments.md").read_text(encoding="utf-8")
    _, example, _ = page.split("\n## ", 2)
    for kind, name in (("python", "shop.py"), ("json", "questions.jsonl"), ("toml", "shop.toml")):
        # The first block of each kind.
        (tmp_path / name).write_text(example.partition(f"```{kind}\n")[2].partition("```")[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    small = ["--steps=1", "--run_dir=run", "--rollout.prompts=2", "--rollout.max_tokens=32"]
    assert main(["train", "shop.toml", *small]) == 0
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["conversation/turns"] >= 1


def test_conversations_are_sampled_ahead_of_training(
    game: Callable[..., Config], tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither delays nor evaluations at the same time change a run, and a resume repeats the batches in flight."""
    setting = ("rollout.max_lag=2", "steps=4", "eval.every=1", "checkpoint.keep=10")
    stand_in(monkeypatch)
    train(game(*setting), display=display)
    records = {step: read_jsonl(tmp_path / f"run/rollouts/{step:06d}.jsonl") for step in range(1, 5)}
    assert any(len(r["turns"]) > 1 for r in chain(*records.values()))
    assert all({r["version"] for r in found} == {2 * max(0, step - 3)} for step, found in records.items())
    stand_in(monkeypatch, seed=1, longest_s=0.1)
    train(game(*setting, run_dir="delayed"), display=display)
    same_end(tmp_path / "run", tmp_path / "delayed")
    shutil.copytree(tmp_path / "run", tmp_path / "cut")
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"cut/checkpoints/{step:06d}")
    kept = json.loads((tmp_path / "cut/checkpoints/000002/in_flight.json").read_bytes())["entries"]
    resume(tmp_path / "cut", display, trust_run=True)
    same_end(tmp_path / "run", tmp_path / "cut")
    assert [history.trained for history in read_ledger(tmp_path / "cut")] == [[step] for step in range(1, 5)]
    assert len(kept) == 3


@pytest.mark.slow
def test_the_sampling_process_keeps_conversations_between_their_turns(
    game: Callable[..., Config], tmp_path: Path, display: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = ("rollout.max_lag=1", "steps=3")
    train(game(*setting, run_dir="process"), display=display)
    rows = [row for row in read_jsonl(tmp_path / "process/metrics.jsonl") if row["step"]]
    assert any(row["conversation/turns"] > 1 for row in rows)
    assert all((row["conversation/reused_fraction"] > 0) == (row["conversation/turns"] > 1) for row in rows)
    stand_in(monkeypatch)
    train(game(*setting), display=display)
    same_end(tmp_path / "run", tmp_path / "process")


def test_a_thread_that_waits_for_a_closed_environment_ends(game: Callable[..., Config]) -> None:
    config = game()
    environment = RunEnvironment(config)
    number = environment.host.open()
    environment.host.submit(number, "step", text="", format="json")
    environment.close()
    with pytest.raises(EngineError, match="were closed"):
        environment.host.poll(60.0)
    with pytest.raises(EngineError, match="were closed"):
        environment.host.open()


def conversation(reward: float, observation: tuple[int, ...], sample: int) -> tuple[Completion, Score]:
    """Two turns with an observation between them."""
    first, second = (5, 6, 7), (8, 9)
    ids = (*first, *observation, *second)
    split = len(first), len(first) + len(observation)
    done = Completion(
        prompt_id="train/0",
        sample=sample,
        token_ids=ids,
        text="",
        logp_sampler=(-1.0, -2.0, -1.5, -0.5, -1.0),
        stop=StopReason.EOS,
        version=0,
        sampled=tuple(not split[0] <= i < split[1] for i in range(len(ids))),
        conversation=Conversation(
            turns=(Turn(start=0, end=split[0], reward=0.5), Turn(start=split[1], end=len(ids), reward=reward)),
            end=ConversationEnd.DONE,
        ),
    )
    return done, Score(status=Status.SCORED, reward=0.5 + reward, correct=True, step_rewards=((2, 0.5), (4, reward)))


def batch_of(context: RunContext, observation: tuple[int, ...]) -> tuple[list[Group], Any]:
    prompt = context.problems.train[0]
    pairs = [conversation(float(i), observation, i) for i in range(4)]
    groups = [Group(prompt=prompt, completions=[c for c, _ in pairs], scores=[s for _, s in pairs])]
    samples = train_samples(groups, context.objective, max_tokens=40)
    return groups, prepare_batch(context, samples, step=1, complete=True)


@pytest.mark.parametrize("name", ["gspo", "gspo_token", "gspo_turn", "grpo"])
def test_observations_are_context_alone(game: Callable[..., Config], parts_of: Any, name: str) -> None:
    context = parts_of(game(f"objective.name={name}", "objective.kl=0", "objective.entropy=0.01"))
    short, long = (batch_of(context, observation)[1] for observation in ((10, 11), (10, 11, 12, 13, 10)))
    # Nothing that is counted, weighted or compared depends on them...
    assert torch.equal(short.tokens.advantage_N, long.tokens.advantage_N)
    assert torch.equal(short.tokens.sequences.length_B, long.tokens.sequences.length_B)
    assert short.tokens.turn_N.tolist() == [0, 0, 0, 1, 1] * 4
    assert short.plan.tokens == long.plan.tokens == 20
    # ... but later turns read them, and earlier ones do not.
    first_N = short.tokens.turn_N == 0
    old, other = short.tokens.logp_old_N, long.tokens.logp_old_N
    torch.testing.assert_close(old[first_N], other[first_N])
    assert not torch.isclose(old[~first_N], other[~first_N]).any()


def trained(context: RunContext, observation: tuple[int, ...], own: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """The weights after a step on conversations with this observation, with every term that a loss may have.

    Attention is off, so a token is predicted from the one before it alone."""
    model = context.policy.model
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.o_proj.weight.requires_grad_(False)
    context = replace(context, reference=copy.deepcopy(model))
    groups, _ = batch_of(context, observation)
    if own:
        changed = [replace(c, token_ids=(*own, *c.token_ids[len(own) :])) for c in groups[0].completions]
        groups = [replace(groups[0], completions=changed)]
    learned = learn(context, groups, step=1)
    assert learned is not None
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def test_no_term_of_the_loss_is_about_observations(game: Callable[..., Config], parts_of: Any) -> None:
    # The last token of an observation is what the next turn is predicted from. The others are predicted by nothing
    # that is trained, and predict nothing that is.
    options = ("objective.name=gspo_token", "objective.kl=0.5", "objective.entropy=0.1", "learner.mini_batches=2")
    variants = [((10, 11, 14), ()), ((12, 13, 14), ()), ((15, 10, 13, 11, 14), ()), ((10, 11, 14), (5, 9, 7))]
    weights = [trained(parts_of(game(*options, run_dir=f"run{i}")), *variant) for i, variant in enumerate(variants)]

    def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return max(float((a[name] - b[name]).abs().max()) for name in a)

    assert furthest(weights[0], weights[1]) < 1e-6
    assert furthest(weights[0], weights[2]) < 1e-6
    assert furthest(weights[0], weights[3]) > 1e-4  # another token of the model's own


def test_the_doctor_tries_the_environment(game: Callable[..., Config]) -> None:
    with ExitStack() as stack:
        checks = [check for check in CHECKS if check.name not in ("memory", "disk", "run directory", "time")]
        findings = run_checks(PreflightContext(config=game(), stack=stack), checks, show=lambda finding: None)
    assert not [f.what for f in findings if f.level is Level.FAIL]
    assert any("Game begins all problems: no tools" in f.what for f in findings)
    assert any("answers a message" in f.what for f in findings)


def test_an_evaluation_has_conversations_with_the_environment(
    game: Callable[..., Config], parts_of: Any, tmp_path: Path
) -> None:
    context = parts_of(game("eval.greedy=true"))
    done = evaluate(
        context.engine,
        context.rewards,
        context.problems.held_out[:3],
        samples=2,
        greedy=True,
        sampling=context.config.rollout.sampling,
        seed=0,
        stream="eval/1",
    )
    assert done.greedy_groups is not None
    greedy = [c for group in done.greedy_groups for c in group.completions]
    sampled = [c for group in done.groups for c in group.completions]
    assert all(set(c.logp_sampler) == {0.0} for c in greedy)
    assert all(c.conversation and set(c.logp_sampler) != {0.0} for c in sampled)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.min_tokens=2", "rollout.min_tokens: is not supported with environment.name"),
        ("rollout.thinking_budget=5", "rollout.thinking_budget: is not supported"),
        (("rollout.max_lag=2", "rollout.span_tokens=8"), "rollout.span_tokens: is not supported"),
        ("environment.turn_tokens=50", "environment.turn_tokens: 50 is more than rollout.max_tokens = 40"),
        ("environment.name=", "environment.max_turns: has no effect without environment.name"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    game: Callable[..., Config], override: str | tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        game(*([override] if isinstance(override, str) else override))


def test_greedy_conversations_are_the_same_on_both_engines(game: Callable[..., Config], parts_of: Any) -> None:
    config = game()
    context = parts_of(config)
    environment = RunEnvironment(config)
    try:
        prompts = environment.open(context.problems.held_out[:4], context.policy.tokenizer)
        policy = context.policy
        parts = EngineContext(model=policy.model, tokenizer=policy.tokenizer, stop_ids=policy.stop_ids)
        served = environment.engine(VllmEngine(parts, SimulatedVllm(policy.model)), policy)
        # A model that was not trained hardly ever ends a turn by itself.
        sampling = replace(config.rollout.sampling.greedy, stop=tuple("0123456789sort "))
        options = GenerateOptions(samples=2, sampling=sampling, seed=0, stream="eval/1", version=0)
        ours, theirs = (engine.generate(prompts, options) for engine in (context.engine, served))
    finally:
        environment.close()
    assert any(len(c.conversation.turns) > 1 for group in ours for c in group if c.conversation)
    assert ours == theirs


def test_conversations_are_sent_between_ranks_unchanged() -> None:
    prompt = Prompt(id="p", content="", text="", token_ids=(1,))
    done, score = conversation(1.0, (10, 11), 0)
    group = Group(prompt=prompt, completions=[done], scores=[score])
    assert decode(Group, encode(group)) == group


def test_a_run_directory_names_the_code_of_its_environment(game: Callable[..., Config]) -> None:
    config = game()
    code = all_code(config, [])[0]  # the modules that it imports follow
    assert code.what == f"environment.name imports {config.environment.name.replace(':', ' and uses ')}"
    assert code.digest


TOOL = """
from gspo.environment import Environment, tool

class Look(Environment):
    "Looks things up."
    @tool
    def look(self, at: str) -> str:
        "Look something up."
        return "nothing"
    def score(self, message):
        return float(self.rng.random() < 0.5)
"""


def test_calls_in_a_format_that_is_not_read_are_found(
    display: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2.5-Coder writes calls in blocks of JSON, although its chat template teaches tags."""
    (tmp_path / "look.py").write_text(TOOL)
    call = write("json_block", ToolCall(name="look", arguments={"at": "5"}))
    sampled = LocalEngine.generate

    def write_call(self: LocalEngine, prompts: Any, options: GenerateOptions) -> list[list[Completion]]:
        assert self.context is not None
        ids = tuple(self.context.tokenizer(call, add_special_tokens=False)["input_ids"])
        ended = {"token_ids": ids, "logp_sampler": (-1.0,) * len(ids), "text": call, "stop": StopReason.STOP}
        return [[replace(c, **ended) for c in group] for group in sampled(self, prompts, options)]

    monkeypatch.setattr(LocalEngine, "generate", write_call)
    tree = tiny_tree(tmp_path / "run")
    tree["data"] = {"task": "secret_number", "task_options": {"largest": 9}, "task_size": 40, "held_out": 4}
    tree["rollout"]["max_tokens"] = 100
    tree["environment"] = {"name": f"{tmp_path}/look.py:Look", "tool_format": "hermes"}
    del tree["reward"]["functions"]
    config = settings.override(tree, ["steps=2"], where="test")
    with ExitStack() as stack:
        checks = [check for check in CHECKS if check.name not in ("memory", "disk", "run directory", "time")]
        findings = run_checks(PreflightContext(config=config, stack=stack), checks, show=lambda finding: None)
    assert any(
        "turns would be tool calls in format json_block" in f.what and "0 turns call" in f.what for f in findings
    )
    train(config, display)
    rows = read_jsonl(Path(config.run_dir) / "metrics.jsonl")
    counts = [row["conversation/other_format/json_block"] for row in rows if row["step"]]
    assert counts == [config.rollout.prompts * config.rollout.group_size] * 2
    run = RunReader(Path(config.run_dir))
    run.refresh()
    assert any(f.name == "tool calls in another format" for f in run.findings())
