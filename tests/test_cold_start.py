"""The cold start on demonstrations of the user's own data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo import config as settings
from gspo.cold_start import run_cold_start
from gspo.config import Config
from gspo.contamination import trained_on
from gspo.data.chat import follows_template
from gspo.data.problems import load_problems
from gspo.errors import ConfigError, DataError
from gspo.learner import sft
from gspo.model.load import char_tokenizer
from gspo.model.micro_batch import TokenSequence
from gspo.preflight.context import PreflightContext
from gspo.preflight.examine import CHECKS, run_checks
from gspo.trainer import resume, train

Rows = list[dict[str, Any]]


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Config]:
    """A run on rows of a file, with a cold start of a few steps."""

    def make(rows: Rows, *overrides: str, run_dir: str = "run") -> Config:
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree = {
            "run_dir": str(tmp_path / run_dir),
            "steps": 1,
            "model": {"build": "tiny_dense", "device": "cpu"},
            "data": {"path": str(tmp_path / "data.jsonl"), "solution_field": "solution", "held_out": 4},
            "rollout": {"prompts": 2, "group_size": 2, "max_tokens": 8},
            "reward": {"functions": ["exact_answer"], "workers": 1},
            "learner": {"mini_batches": 1},
            "eval": {"every": 0},
            "cold_start": {"steps": 2, "batch": 4, "check_every": 2},
        }
        config = settings.override(tree, overrides, where="test")
        settings.check(config)
        return config

    return make


def sums(count: int) -> Rows:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1), "solution": str(i + 1)} for i in range(count)]


@pytest.fixture
def lessons(monkeypatch: pytest.MonkeyPatch) -> list[TokenSequence]:
    """The demonstrations that fine-tuning gets, without training on them."""
    seen: list[TokenSequence] = []

    def record(self: Any, sequences: list[TokenSequence]) -> float:
        seen.extend(sequences)
        return 0.0

    monkeypatch.setattr(sft.FineTuner, "step", record)
    return seen


def decoded(parts: Any, sequences: list[TokenSequence]) -> list[tuple[str, str]]:
    """(prompt, completion), with special tokens."""
    decode = parts.policy.tokenizer.decode
    return [(decode(s.prompt_ids), decode(s.completion_ids)) for s in sequences]


def test_it_trains_on_prompts_followed_by_their_demonstrations(
    own: Callable[..., Config], parts_of: Any, display: Any, lessons: list[TokenSequence]
) -> None:
    parts = parts_of(own(sums(30), "cold_start.steps=20"))
    done = run_cold_start(parts, display)
    by_prompt = {p.text: p for p in parts.problems.train}
    pairs = decoded(parts, lessons)
    assert len(pairs) == 80
    end = parts.policy.tokenizer.decode([parts.policy.end_id])
    for prompt, completion in pairs:
        problem = by_prompt[prompt]
        assert completion == str(problem.columns["answer"]) + end
    # 26 problems for training, of which a fifth is set aside for checks: the others are visited in turn.
    assert len(set(pairs)) == 26 - 5
    assert len(set(pairs[:21])) == 21
    assert done.demonstrations == {"demonstrations": 21}
    assert not {prompt for prompt, _ in pairs} & {p.text for p in parts.problems.held_out}


def test_micro_batch_tokens_bound_its_forwards_and_do_not_change_what_it_learns(
    own: Callable[..., Config], parts_of: Any, display: Any
) -> None:
    largest, weights = [], []
    for budget in (1000, 20):
        settings = (f"learner.micro_batch_tokens={budget}", "cold_start.batch=12")
        parts = parts_of(own(sums(30), *settings, run_dir=f"run{budget}"))
        model, widths = parts.policy.model, [0]

        def record(module: Any, args: Any, options: Any, widths: list[int] = widths) -> None:
            if torch.is_grad_enabled():  # not while it samples
                widths.append(options["input_ids"].numel())

        model.register_forward_pre_hook(record, with_kwargs=True)
        run_cold_start(parts, display)
        largest.append(max(widths))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert largest[1] <= 20 < largest[0]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_checks_use_problems_that_are_not_trained_on(
    own: Callable[..., Config], parts_of: Any, display: Any, lessons: list[TokenSequence], monkeypatch: Any
) -> None:
    parts = parts_of(own([*sums(30), *sums(30)], "data.held_out=0"))  # every problem twice
    checked: set[str] = set()
    generate = parts.engine.generate

    def recording(prompts: Any, options: Any) -> Any:
        checked.update(p.text for p in prompts)
        return generate(prompts, options)

    monkeypatch.setattr(parts.engine, "generate", recording)
    run_cold_start(parts, display)
    assert checked
    assert not checked & {prompt for prompt, _ in decoded(parts, lessons)}


def test_demonstrations_that_cannot_be_used_are_left_out_and_counted(
    own: Callable[..., Config], parts_of: Any, display: Any, lessons: list[TokenSequence], tmp_path: Path
) -> None:
    (tmp_path / "strict.py").write_text(
        "def strict(prompts, completions, answer, **columns):\n"
        "    if completions[0].startswith('!'):\n"
        "        raise ValueError('no')\n"
        "    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"
    )
    rows = sums(60)
    good = [str(i + 1) for i in range(60)]
    for i in range(0, 60, 6):
        rows[i]["solution"] = "0"  # wrong
        rows[i + 1]["solution"] = f"!{i}"  # unscored
        rows[i + 2]["solution"] = " " * 4 + str(i + 3) + " " * 4  # too long
        rows[i + 3]["solution"] = f"{i + 4}é"  # not in the vocabulary
        rows[i + 4]["solution"] = [None, "", [{"role": "assistant", "content": str(i + 5)}]][i // 6 % 3]
    functions = f"reward.functions={tmp_path}/strict.py:strict"
    parts = parts_of(own(rows, functions, "cold_start.steps=30", "data.held_out=0"))
    done = run_cold_start(parts, display)
    counts = dict(done.demonstrations)
    assert set(counts) == {"demonstrations", "wrong", "unscored", "too_long", "garbled"}
    used = {completion for _, completion in decoded(parts, lessons)}
    end = parts.policy.tokenizer.decode([parts.policy.end_id])
    assert used <= {g + end for g in good}
    assert len(used) == counts["demonstrations"]
    for name, text in (("wrong", "not scored as correct"), ("too_long", "longer than rollout.max_tokens")):
        (message,) = [m for m in display.messages if text in m]
        assert message.startswith(f"warning: {counts[name]} of ")
    (message,) = [m for m in display.messages if "are trained on" in m]
    assert f"{counts['demonstrations']} of {sum(counts.values())} demonstrations" in message
    assert any(re.search(r"[1-9]\d* other training problems measure its accuracy", m) for m in display.messages)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([row | {"solution": "no"} for row in sums(20)], "8 are not scored as correct"),
        (
            [{k: v for k, v in row.items() if k != "solution"} for row in sums(20)],
            "none of the 13 training rows has one in field 'solution'; other fields: answer",
        ),
    ],
)
def test_no_usable_demonstration_is_an_error(
    own: Callable[..., Config], parts_of: Any, display: Any, rows: Rows, why: str
) -> None:
    with pytest.raises(DataError, match=f"data.solution_field: no demonstration .*{why}"):
        run_cold_start(parts_of(own(rows)), display)


def test_the_answer_field_may_hold_the_demonstration(own: Callable[..., Config], parts_of: Any, display: Any) -> None:
    rows = [{"prompt": f"{i}+1", "answer": f"so #### {i + 1}"} for i in range(20)]
    overrides = ("data.solution_field=answer", "data.answer_after=####", "rollout.max_tokens=16")
    config = own(rows, *overrides, "reward.options.exact_answer.marker=####")
    prompt = load_problems(config.data, char_tokenizer("".join(map(chr, range(32, 127)))), 0).train[0]
    assert prompt.demonstration == f"so #### {prompt.columns['answer']}"
    assert run_cold_start(parts_of(config), display).demonstrations["demonstrations"] > 4


@pytest.mark.parametrize(
    "value", [3, ["text"], [{"role": "user", "content": "1"}], {"a": 1}, [{"role": "assistant"}, 1]]
)
def test_a_demonstration_of_another_type_is_a_bad_row(own: Callable[..., Config], value: Any) -> None:
    rows = sums(20)
    rows[7]["solution"] = value
    with pytest.raises(DataError, match=r"data.jsonl:8: field 'solution': must be text, or a list with one assistant"):
        load_problems(own(rows).data, char_tokenizer("0123456789+="), 0)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("data.solution_field=",), "cold_start.steps: there are no demonstrations; set data.solution_field"),
        (("data.task=addition", "data.path="), "data.solution_field: has no effect with data.task"),
    ],
)
def test_settings_that_do_not_go_together(own: Callable[..., Config], overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        own(sums(20), *overrides)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("data.solution_field=prompt",), "is data.prompt_field too"),
        (("data.prompt_template={prompt} {solution}",), "which is data.solution_field"),
    ],
)
def test_the_model_is_not_shown_the_demonstration(
    own: Callable[..., Config], overrides: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        load_problems(own(sums(20), *overrides).data, char_tokenizer("0123456789+= "), 0)


def test_a_run_learns_from_its_demonstrations_and_resumes_bitwise(own: Callable[..., Config], display: Any) -> None:
    rows = [{"prompt": f"q{i}", "answer": "7", "solution": "7"} for i in range(30)]
    rows[3]["solution"] = "8"
    start = ("cold_start.steps=60", "cold_start.check_every=10", "cold_start.batch=8", "steps=2")
    whole, cut = own(rows, *start, run_dir="whole"), own(rows, *start, "steps=1", run_dir="cut")
    train(whole, display)
    train(cut, display)
    resume(cut.run_dir, display, steps=2)
    first, second = (Path(c.run_dir) / "metrics.jsonl" for c in (whole, cut))
    assert first.read_bytes() == second.read_bytes()
    events = [json.loads(line) for line in (Path(whole.run_dir) / "events.jsonl").read_text().splitlines()]
    (event,) = [e for e in events if e["event"] == "cold_start"]
    assert event["accuracy"] >= 0.3
    assert event["demonstrations"] + event.get("wrong", 0) == 26 - 5
    # The demonstrations belong to the training problems, which an evaluation of the checkpoint has to exclude.
    keys = trained_on(str(Path(whole.run_dir) / "checkpoints/000002"), char_tokenizer("q0123456789"))
    assert len(keys & {row["prompt"] for row in rows}) == 26


class Template:
    """A tokenizer that renders a chat."""

    chat_template = "any"

    def __init__(self, think: str = "", strip: bool = False) -> None:
        self.think, self.strip = think, strip

    def apply_chat_template(self, messages: Any, tokenize: bool) -> str:
        if messages[-1]["content"] == "refuse":
            raise ValueError("no")
        text = [m["content"].strip() if self.strip else m["content"] for m in messages]
        return f"U:{text[0]}\nA:{self.think}{text[1]}<end>"


def test_whether_the_template_writes_the_demonstration() -> None:
    prompt = "U:1+1\nA:"
    assert follows_template(prompt, "1+1", "2", Template(), chat="auto")
    assert follows_template(prompt, "1+1", " 2\n", Template(strip=True), chat="auto")
    assert not follows_template(prompt, "1+1", "2", Template(think="<think></think>"), chat="auto")
    assert not follows_template("other", "1+1", "2", Template(), chat="auto")
    assert follows_template(prompt, "1+1", "refuse", Template(), chat="auto")
    assert follows_template(prompt, "1+1", "2", Template(think="x"), chat="no")


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        (lambda i, row: row, "ok", "20 of 20 demonstrations are scored as correct"),
        (lambda i, row: row | {"solution": "x"} if i % 4 == 0 else row, "warning", "demonstrations are scored as"),
        (lambda i, row: row | {"solution": "x"}, "fail", "0 of 20 demonstrations are scored as correct"),
        (lambda i, row: row | {"solution": None}, "fail", "No training problem has a demonstration"),
    ],
)
def test_the_doctor_scores_the_demonstrations(
    own: Callable[..., Config], change: Callable[[int, Any], Any], status: str, text: str
) -> None:
    config = own([change(i, row) for i, row in enumerate(sums(24))])
    names = ("data", "reward functions", "known answers")
    with ExitStack() as stack:
        context = PreflightContext(config=config, stack=stack)
        found = run_checks(context, [c for c in CHECKS if c.name in names], show=lambda finding: None)
    (finding,) = [f for f in found if "demonstration" in f.what]
    assert finding.level.lower() == status, finding
    assert text in finding.what
