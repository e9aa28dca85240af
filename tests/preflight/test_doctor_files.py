"""Settings, data, tokenizer and chat template: a recipe that passes, and one for each thing that can be wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gspo.config import Config
from gspo.model.load import char_tokenizer
from gspo.preflight import tokens

FILE = ["data.task=", "data.task_options={}", "data.task_size=20000", "data.held_out=2"]


@pytest.fixture
def on_file(tiny: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A config whose problems are these rows."""

    def make(rows: list[dict[str, Any]], *overrides: str) -> Config:
        path = tmp_path / "problems.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tiny(*FILE, f"data.path={path}", *overrides)

    return make


def rows(count: int = 20) -> list[dict[str, Any]]:
    return [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(count)]


# ------------------------------------------------------------------------------------------------- settings


def test_settings_and_objective_pass(tiny: Callable[..., Config], examined: Any) -> None:
    found = examined(tiny(), "settings", "objective")
    assert found.levels("settings") == ["ok"]
    assert found.levels("objective") == ["ok"]
    assert "16 completions per step in 2 optimizer steps" in found.only("objective").what


def test_an_option_without_effect_fails(tiny: Callable[..., Config], examined: Any) -> None:
    config = tiny()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, split="test"))
    found = examined(config, "settings", "objective")
    assert found.levels("settings") == ["FAIL"]
    assert "data.split: has no effect" in found.only("settings").what
    assert found.levels("objective") == ["ok"], "an early failure must not prevent later checks"


def test_a_sink_that_is_not_installed_fails(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = examined(tiny("log.sinks=wandb"), "settings")
    assert found.levels("settings") == ["ok", "FAIL"]
    assert "wandb is not installed" in found["settings"][1].what


@pytest.mark.parametrize(
    ("override", "level", "words"),
    [
        ("objective.clip_high=0.2", "warning", "hardly ever clips"),
        ("learner.mini_batches=1", "note", "always 1"),
        ("objective.name=grpo", "note", "frozen copy"),
        ("rollout.group_size=1", "FAIL", "at least 2"),
    ],
)
def test_doubtful_objective_settings_are_reported(
    tiny: Callable[..., Config], examined: Any, override: str, level: str, words: str
) -> None:
    last = examined(tiny(override), "objective")["objective"][-1]
    assert last.level == level
    assert words in last.what


# ------------------------------------------------------------------------------------------------- data


def test_data_passes(on_file: Callable[..., Config], examined: Any) -> None:
    found = examined(on_file(rows(400), "data.held_out=100"), "tokenizer", "model files", "data", "prompt lengths")
    assert found.levels("data") == ["ok", "ok"]
    assert found["data"][0].numbers["train"] == 300
    assert found.levels("prompt lengths") == ["ok", "ok"]


def test_a_missing_field_fails_and_later_checks_still_run(on_file: Callable[..., Config], examined: Any) -> None:
    found = examined(
        on_file(rows(), "data.prompt_field=question"), "tokenizer", "data", "prompt lengths", "run directory"
    )
    assert found.levels("data") == ["FAIL"]
    assert "question" in found.only("data").what
    assert "prompt, answer" in found.only("data").what
    assert "data could not be read" in found.only("not checked").what
    assert found.levels("run directory") == ["ok"]


def test_a_missing_answer_fails(on_file: Callable[..., Config], examined: Any) -> None:
    broken = [*rows(), {"prompt": "no answer"}]
    finding = examined(on_file(broken), "tokenizer", "data").only("data")
    assert finding.level == "FAIL"
    assert any("field 'answer'" in line for line in finding.detail)


@pytest.mark.parametrize(("bad", "level"), [(1, "note"), (10, "warning")])
def test_skipped_rows_are_counted_with_the_first_errors(
    on_file: Callable[..., Config], examined: Any, bad: int, level: str
) -> None:
    broken = [*rows(40), *({"prompt": f"{i}"} for i in range(bad))]
    finding = examined(on_file(broken, "data.on_bad_row=skip"), "tokenizer", "data")["data"][1]
    assert (finding.level, finding.numbers["skipped"]) == (level, bad)
    assert "field 'answer'" in finding.detail[0]


def test_rows_are_read_without_a_tokenizer(on_file: Callable[..., Config], examined: Any) -> None:
    chat = [{"prompt": [{"role": "user", "content": f"{i}"}], "answer": "1"} for i in range(20)]
    for data in (rows(), chat):
        found = examined(on_file(data), "data", "prompt lengths")
        assert found["data"][0].level == "ok"
        assert found["data"][0].numbers["train"] == 18
        assert "tokenizer did not load" in found.only("not checked").what
    repeated = [{"prompt": [{"role": "user", "content": "What is 2 + 2?"}], "answer": "4"} for _ in range(2)]
    found = examined(on_file([*chat, *repeated], "data.held_out=0", "eval.every=0"), "data")["data"]
    assert [f.what for f in found if f.detail == ("What is 2 + 2?",)] == [
        "1 training row repeats the prompt of another row; the most common one occurs 2 times."
    ]
    assert examined(on_file(rows(), "data.answer_field=solution"), "data").levels("data") == ["FAIL"]


def test_overlap_repetition_and_too_few_problems(on_file: Callable[..., Config], examined: Any, tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?", "answer": "2"}) + "\n")
    data = [{"prompt": f"What is {i % 3} + 1?", "answer": "1"} for i in range(9)]
    config = on_file(data, f"data.held_out_path={tmp_path}/held.jsonl", "rollout.prompts=50")
    what = [f"{f.level}: {f.what}" for f in examined(config, "tokenizer", "data")["data"]]
    assert any("note: 3 training problems duplicate a held-out" in w for w in what)
    assert any("note: 4 training rows repeat" in w for w in what)
    assert any("warning: A step samples 50 prompts, but there are only 6" in w for w in what)
    assert any("only to ±" in w for w in what)


def test_a_completion_that_could_exceed_the_positions_fails(tiny: Callable[..., Config], examined: Any) -> None:
    config = tiny("rollout.max_tokens=4095")
    finding = examined(config, "tokenizer", "model files", "data", "prompt lengths")["prompt lengths"][-1]
    assert finding.level == "FAIL"
    longest = finding.what.split(" has ")[1].split()[0]
    assert f"at most {4096 - int(longest)}" in finding.do


def test_characters_the_tokenizer_does_not_know(on_file: Callable[..., Config], examined: Any) -> None:
    found = examined(on_file([*rows(), {"prompt": "日本", "answer": "1"}]), "tokenizer", "data", "prompt lengths")
    finding = found["prompt lengths"][1]
    assert (finding.level, finding.numbers["unknown"]) == ("warning", 1)


# ------------------------------------------------------------------------------------------------- tokenizer

USER = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
CLOSED = "{% if m['role'] == 'assistant' %}{{ 'END' }}{% endif %}{% endfor %}"
CUE = "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
BARE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user>' + m['content'] + '|' }}"
    "{% else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}"
)


@pytest.fixture
def with_template(tiny: Callable[..., Config], examined: Any, monkeypatch: Any) -> Any:
    """Run the tokenizer checks on a tokenizer with this chat template."""

    def run(template: str | None, *overrides: str, **attributes: Any) -> Any:
        tokenizer = char_tokenizer("".join(map(chr, range(32, 127))))
        tokenizer.chat_template = template
        for name, value in attributes.items():
            setattr(tokenizer, name, value)
        monkeypatch.setattr(tokens, "tokenizer_for", lambda *args, **options: tokenizer)
        config = tiny(*overrides)
        return examined(config, "tokenizer", "model files", "data", "chat template", "stop tokens")

    return run


def test_a_good_template_passes(with_template: Any) -> None:
    found = with_template(USER + CLOSED.replace("END", "<end>") + CUE)
    assert found.levels("tokenizer") == ["ok"]
    assert found.levels("chat template") == ["ok", "ok"]
    assert found.levels("stop tokens") == ["ok", "ok"]
    assert found["chat template"][0].numbers["prompt"].startswith("<user>")
    assert "'<assistant>'" in found["chat template"][1].what


def test_a_template_without_a_generation_prompt_is_a_warning(with_template: Any) -> None:
    finding = with_template(USER + CLOSED.replace("END", "<end>"))["chat template"][1]
    assert finding.level == "warning"
    assert "add_generation_prompt" in finding.what
    assert finding.numbers["header"] == "<assistant>"


def test_a_template_that_needs_no_generation_prompt_passes(with_template: Any) -> None:
    assert with_template(BARE).levels("chat template") == ["ok", "ok"]


def test_an_end_of_turn_that_is_no_stop_token_is_a_warning(with_template: Any) -> None:
    finding = with_template(USER + CLOSED.replace("END", "<pad>") + CUE)["stop tokens"][1]
    assert finding.level == "warning"
    assert finding.numbers["end_of_turn"] == 0
    assert "<pad>" in finding.what
    assert '"eos_token": "<pad>"' in finding.do


def test_a_turn_that_is_never_closed_is_noted(with_template: Any) -> None:
    assert with_template(USER + CLOSED.replace("END", "") + CUE).levels("stop tokens") == ["ok", "note"]


def test_prompts_without_a_template_are_noted(with_template: Any) -> None:
    found = with_template(None)
    assert found.levels("chat template") == ["note"]
    assert found.levels("stop tokens") == ["ok"]
    assert with_template(USER + CUE, "data.chat=no").levels("chat template") == ["note"]


def test_padding_that_is_the_end_token_is_noted(with_template: Any) -> None:
    assert with_template(USER + CUE, pad_token="<end>").levels("tokenizer") == ["ok", "note"]


def test_a_model_without_a_stop_token_fails(with_template: Any) -> None:
    found = with_template(USER + CUE, eos_token=None)
    assert found.levels("stop tokens") == ["FAIL"]


def test_a_tokenizer_of_another_model(tiny: Callable[..., Config], examined: Any) -> None:
    found = examined(tiny(), "tokenizer", "model files", "data")
    context = found.context
    context.tokenizer = char_tokenizer("".join(map(chr, range(32, 1000))))
    assert [f.level for f in tokens._vocabulary(context)] == ["warning"]
    prompt = context.problems.train[0]
    object.__setattr__(prompt, "token_ids", (10_000,))
    assert [f.level for f in tokens._vocabulary(context)] == ["FAIL"]
