"""The `gspo replay` command: its output, its files and its error messages."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import copy_of, digest, make_run
from torch.nn.modules.module import register_module_forward_hook

from gspo import objective_names
from gspo.activity import current
from gspo.cli import main
from gspo.record.run_dir import lock
from gspo.view.replay.replay import Request, compute
from gspo.view.replay.source import ranges


class Tags(HTMLParser):
    """The tags and addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href") or key.startswith("on")]


@pytest.fixture(scope="session")
def written(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    """The folder of a replay, its output, and whether the run is unchanged, while a trainer holds the run's lock."""
    out = tmp_path_factory.mktemp("replay") / "out"
    holder = lock(run, busy="", option="")
    before = digest(run)
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: printed.append(" ".join(map(str, a))))
        sweeps = ["--sweep", "clip_high=1e-5..1:5", "--sweep", "kl=1e-3..1:3"]
        assert main(["replay", str(run), "--step", "2", *sweeps, "-o", str(out)]) == 0
    holder.close()
    return out, "\n".join(printed), before == digest(run)


def test_a_replay_says_what_it_computes(run: Path, tmp_path: Path) -> None:
    seen: set[str] = set()

    def look(*_: object) -> None:
        seen.update(f"{one.name} of {one.total} {one.unit}" for path in current() for one in path)

    handle = register_module_forward_hook(look)
    try:
        assert main(["replay", str(run), "--step", "2", "--objectives", "gspo,grpo", "-o", str(tmp_path / "out")]) == 0
    finally:
        handle.remove()
    assert any(text.startswith("gradients of ") and text.endswith(" backward passes") for text in seen)


def test_a_locked_run_directory_is_replayed_and_not_changed(written: tuple[Path, str, bool]) -> None:
    assert written[2]


def test_the_terminal_output(written: tuple[Path, str, bool]) -> None:
    text = written[1]
    assert "step 2 (from checkpoint 1), the last of 3 mini-batches: 11 completions" in text
    assert "Exact: step 2 agrees with the run" in text
    table = [line for line in text.splitlines() if re.match(r"[a-z_]+ ", line)]
    assert {"grpo", "reinforce_pp", "rloo"} <= {line.split()[0] for line in table}
    assert "ppo_clip is not computed: its advantages come from a critic" in text
    assert "clip_high, 0.004 in the run:" in text
    assert "kl, 0 in the run:" in text
    # The paths of a test are longer than a user's.
    assert max(len(line) for line in text.splitlines() if "/pytest-" not in line) <= 130


def test_the_contents_of_replay_json(written: tuple[Path, str, bool], run: Path) -> None:
    data = json.loads((written[0] / "replay.json").read_text())
    assert (data["step"], data["checkpoint"], data["mini_batch"], data["mini_batches"]) == (2, 1, 3, 3)
    assert data["exact"] is True
    assert len(data["rows"]) == len(data["cosines"]) == len(data["cosines"][0]) == len(objective_names())
    assert all(len(row["weights"]) == len(data["completions"]) == 11 for row in data["rows"])
    assert data["grad_norm_in_run"] == pytest.approx(data["run_grad_norm"], rel=1e-6)
    assert [s["setting"] for s in data["sweeps"]] == ["clip_high", "kl"]
    records = [json.loads(line) for line in (run / "rollouts" / "000002.jsonl").read_text().splitlines()]
    by_id = {(record["prompt_id"], record["sample"]): record for record in records}
    compared = 0
    for completion in data["completions"]:
        record = by_id[completion["prompt_id"], completion["sample"]]
        # The run did not compute those with advantage 0; the replay computes all.
        if record.get("computed", True):
            compared += 1
        else:
            assert record["advantage"] == 0
            assert math.isfinite(completion["log_ratio"])
            continue
        log_ratio = (sum(record["logp_new"]) - sum(record["logp_old"])) / completion["tokens"]
        assert completion["log_ratio"] == pytest.approx(log_ratio, abs=1e-6)
    assert compared


def test_every_key_of_replay_json_is_documented(written: tuple[Path, str, bool]) -> None:
    data = json.loads((written[0] / "replay.json").read_text())
    text = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()
    section = text[text.index("## replay.json") : text.index("## Interpretation")]
    first = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section, re.MULTILINE)
    assert {key.strip("`") for cell in first for key in cell.split(", ")} == set(data)
    sweep = data["sweeps"][0]
    nested = (data["rows"][0], sweep, sweep["points"][0], data["completions"][0], data["agreements"][0])
    for key in (key for record in nested for key in record):
        assert f"`{key}`" in section, key


def test_the_page_is_self_contained_and_runs_no_script(written: tuple[Path, str, bool]) -> None:
    page = Tags((written[0] / "replay.html").read_text())
    assert {"h1", "table", "img", "figure"} <= page.tags
    assert page.tags.isdisjoint({"script", "iframe", "link", "object", "form"})
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert len(page.addresses) == 4
    names = {f.name for f in (written[0] / "figures").iterdir()}
    assert names == {"cosines.png", "weights.png", "sweep-clip_high.png", "sweep-kl.png"}


def test_the_page_escapes_its_texts(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path).rename(tmp_path / "<b>run&")
    assert main(["replay", str(copy), "--objectives", "grpo", "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "replay.html").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;run&amp;" in text


def test_without_a_step_the_last_one_is_replayed_and_the_first_mini_batch_clips_nothing(run: Path) -> None:
    found = compute(Request(run=str(run), mini_batch=1, objectives="grpo,gspo"))
    assert found == compute(Request(run=str(run), mini_batch=1, objectives="grpo,gspo")), "not deterministic"
    assert (found.step, found.start) == (3, 2)
    assert found.numbers.token_log_std == 0
    assert all(row.clipped_tokens.share == 0 for row in found.numbers.rows)
    assert found.numbers.rows[0].grad_norm == pytest.approx(found.run_grad_norm, rel=1e-6)


def test_a_moe_model_with_a_load_balancing_loss(tmp_path: Path) -> None:
    """Routing replay uses the old experts. The rows exclude the balancing loss; the check of the norm includes it."""
    routing = ("routing.replay=old", "routing.balance_loss=0.5")
    run = make_run(tmp_path, "steps=1", "model.build=tiny_moe", "learner.mini_batches=2", *routing)
    found = compute(Request(run=str(run), objectives="grpo,gspo+clip_high=1e-6"))
    assert found.exact
    assert found.numbers.balanced
    assert found.numbers.grad_norm_in_run == pytest.approx(found.run_grad_norm, rel=1e-6)
    assert found.numbers.rows[0].grad_norm != pytest.approx(found.run_grad_norm, rel=1e-3)
    by_label = {row.label: row for row in found.numbers.rows}
    assert by_label["gspo+clip_high=1e-6"].clipped_tokens.above >= by_label["gspo (run)"].clipped_tokens.above
    assert by_label["grpo"].note == "", "checkpoint 0 is the reference"
    assert by_label["grpo"].loss_kl > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_of_16_bit_weights(dtype: str, tmp_path: Path) -> None:
    """Measuring must not leave anything behind in the float32 buffer of the LM head's gradient."""
    run = make_run(tmp_path, "steps=1", f"model.dtype={dtype}", "learner.mini_batches=2")
    found = compute(Request(run=str(run), objectives="grpo,gspo+clip_high=1e-6"))
    assert found.exact
    assert found.numbers.grad_norm_in_run == pytest.approx(
        found.run_grad_norm, rel=1e-2 if dtype == "bfloat16" else 2e-3
    )


def test_without_a_reference_the_kl_penalty_is_omitted_with_a_note(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path, without=(0,))
    found = compute(Request(run=str(copy), step=3, objectives="grpo,rloo"))
    by_label = {row.label: row for row in found.numbers.rows}
    assert "without its KL penalty (0.04): the run kept no reference model" in by_label["grpo"].note
    assert by_label["grpo"].loss_kl == 0
    assert by_label["rloo"].note == ""


INVALID_REQUESTS: dict[str, tuple[list[str], str]] = {
    "unknown step": (
        ["--step", "9"],
        "step 9 cannot be replayed: its completions are not in rollouts/; choose one of: 1-3",
    ),
    "unknown checkpoint": (["--from", "7"], "--from: there is no checkpoint 7; choose one of: 0-3"),
    "checkpoint after the step": (["--from", "2", "--step", "1"], "step 1 cannot be replayed"),
    "unknown objective": (["--objectives", "grppo"], "no objective 'grppo'"),
    "unknown setting": (["--objectives", "grpo+clip=1"], "has no setting 'clip'; did you mean"),
    "setting of the run": (["--objectives", "grpo+replay"], "routing.replay is not a setting of an objective"),
    "sweep without a range": (["--sweep", "clip_high"], "is not SETTING=LOW..HIGH[:COUNT]"),
    "sweep from 0": (["--sweep", "clip_high=0..1"], "LOW must be above 0"),
    "sweep of a string": (["--sweep", "keep=1..2"], "no numeric setting 'keep'; choose one of: clip_low, clip_high"),
    "sweep of another objective's setting": (["--sweep", "tau_pos=1..2"], "gspo has no numeric setting 'tau_pos'"),
    "sweep without numbers": (["--sweep", "clip_high=a..b"], "'a' is not a number"),
    "sweep with one point": (["--sweep", "clip_high=1e-3..1e-2:1"], "the count must be from 2"),
    "sweep given twice": (["--sweep", "kl=1e-3..1e-2", "--sweep", "kl=1..2"], "kl is given twice"),
    "sweep with invalid values": (["--sweep", "dual_clip=0.5..3"], "dual_clip: must be above 1"),
    "unknown mini-batch": (["--mini-batch", "4", "--objectives", "grpo"], "step 3 has 3 mini-batches, not 4"),
    "folder that cannot be created": (["-o", f"{__file__}/replay"], "test_replay_command.py; choose another"),
    "unknown device": (["--device", "tpu"], "model.device"),
}


@pytest.mark.parametrize("case", INVALID_REQUESTS)
def test_invalid_requests_are_refused_in_one_line(
    run: Path, case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments, message = INVALID_REQUESTS[case]
    assert main(["replay", str(run), "-o", str(tmp_path / "out"), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_invalid_directories_and_options_are_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["replay", str(tmp_path)]) == 1
    assert "not a run directory" in capsys.readouterr().err
    assert main(["replay", str(run), "-o", str(run / "replay")]) == 1
    assert "inside the run directory" in capsys.readouterr().err
    assert main(["replay", str(run), "--seed=1"]) == 1
    assert "unknown option --seed=1" in capsys.readouterr().err


def test_the_error_names_the_steps_that_can_be_replayed(run: Path, tmp_path: Path, capsys: Any) -> None:
    copy = copy_of(run, tmp_path, without=(0, 1))
    (copy / "rollouts" / "000001.jsonl").unlink()
    assert main(["replay", str(copy), "--step", "2"]) == 1
    reason = "no checkpoint before it has recorded completions for all steps in between; choose one of: 3 "
    assert f"step 2 cannot be replayed: {reason}" in capsys.readouterr().err
    for file in (copy / "rollouts").iterdir():
        file.unlink()
    assert main(["replay", str(copy)]) == 1
    assert "no step can be replayed: rollouts/ has no completions" in capsys.readouterr().err


def test_a_run_without_recorded_completions_is_refused(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path, "steps=1", "log.rollouts=false")
    assert main(["replay", str(run)]) == 1
    assert "log.rollouts was false" in capsys.readouterr().err


def test_a_batch_without_training_signal(tmp_path: Path) -> None:
    """All completions have the same reward: gradients are 0, cosines are undefined, and the report says so."""
    run = make_run(tmp_path, "steps=1", f"reward.functions={tmp_path}/spaces.py:flat")
    out = tmp_path / "out"
    assert main(["replay", str(run), "--sweep", "clip_high=1e-3..1:2", "-o", str(out)]) == 0
    data = json.loads((out / "replay.json").read_text())
    own, dapo = data["rows"][0], next(row for row in data["rows"] if row["label"] == "dapo")
    assert (own["grad_norm"], own["cosine"], own["effective_completions"]) == (0, None, 0)
    assert (dapo["completions"], dapo["loss"]) == (0, 0)
    assert any("is 0: this mini-batch has no training signal" in text for text in data["reading"])


def test_a_step_without_a_trainable_completion_is_refused(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "same.py").write_text(
        "def same(prompts, completions, **columns):\n    return [0.1] * len(completions)\n"
    )
    run = make_run(tmp_path, "steps=1", "objective.name=dapo", f"reward.functions={tmp_path}/same.py:same")
    assert main(["replay", str(run)]) == 1
    assert "step 1 has no trainable completion" in capsys.readouterr().err


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges([]) == ""
