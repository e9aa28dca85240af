"""`gspo replay` as a user meets it: what it prints and writes, what it refuses, what it leaves alone."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import copy_of, digest, make_run

from gspo.cli import main
from gspo.record.run_dir import lock
from gspo.view.replay.replay import Request, compute
from gspo.view.replay.source import ranges


class Tags(HTMLParser):
    """Every tag of a page and every address in it."""

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
    """The folder of a replay, what it printed, and whether the run was left as it was, all while a trainer holds it."""
    out = tmp_path_factory.mktemp("replay") / "out"
    holder = lock(run, busy="", option="")
    before = digest(run)
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *a, **k: printed.append(" ".join(map(str, a))))
        assert main(["replay", str(run), "--step", "2", "--sweep", "clip_high=1e-5..1:5", "--sweep", "kl=1e-3..1:3", "-o", str(out)]) == 0  # fmt: skip
    holder.close()
    return out, "\n".join(printed), before == digest(run)


def test_the_run_directory_is_neither_changed_nor_needed_alone(written: tuple[Path, str, bool]) -> None:
    assert written[2]


def test_what_is_printed(written: tuple[Path, str, bool]) -> None:
    text = written[1]
    assert "step 2 (from checkpoint 1), the last of 3 mini-batches: 11 replies" in text
    assert "Exact: step 2 went as in the run" in text
    table = [line for line in text.splitlines() if re.match(r"[a-z_]+ ", line)]
    assert {"grpo", "reinforce_pp", "rloo"} <= {line.split()[0] for line in table}
    assert "ppo_clip is not computed: its advantages come from outside" in text
    assert "clip_high, 0.004 in the run:" in text
    assert "kl, 0 in the run:" in text
    assert max(map(len, text.splitlines())) <= 130


def test_the_numbers_are_written(written: tuple[Path, str, bool], run: Path) -> None:
    data = json.loads((written[0] / "replay.json").read_text())
    assert (data["step"], data["checkpoint"], data["mini_batch"], data["mini_batches"]) == (2, 1, 3, 3)
    assert data["exact"] is True
    assert len(data["rows"]) == len(data["cosines"]) == len(data["cosines"][0]) == 18
    assert all(len(row["weights"]) == len(data["replies"]) == 11 for row in data["rows"])
    assert data["grad_norm_in_run"] == pytest.approx(data["run_grad_norm"], rel=1e-6)
    assert [s["setting"] for s in data["sweeps"]] == ["clip_high", "kl"]
    replies = [json.loads(line) for line in (run / "rollouts" / "000002.jsonl").read_text().splitlines()]
    for reply in data["replies"]:
        record = next(r for r in replies if (r["prompt_id"], r["sample"]) == (reply["prompt_id"], reply["sample"]))
        assert reply["log_ratio"] == pytest.approx(
            sum(record["logp_new"]) / reply["tokens"] - sum(record["logp_old"]) / reply["tokens"], abs=1e-6
        )


def test_every_key_of_the_numbers_is_documented(written: tuple[Path, str, bool]) -> None:
    data = json.loads((written[0] / "replay.json").read_text())
    text = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
    section = text[text.index("## replay.json") : text.index("## Reading it")]
    first = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section, re.MULTILINE)
    assert {key.strip("`") for cell in first for key in cell.split(", ")} == set(data)
    for key in (*data["rows"][0], *data["sweeps"][0], *data["sweeps"][0]["points"][0], *data["replies"][0], *data["agreements"][0]):  # fmt: skip
        assert f"`{key}`" in section, key


def test_the_page_needs_nothing_and_runs_nothing(written: tuple[Path, str, bool]) -> None:
    page = Tags((written[0] / "replay.html").read_text())
    assert {"h1", "table", "img", "figure"} <= page.tags
    assert page.tags.isdisjoint({"script", "iframe", "link", "object", "form"})
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert len(page.addresses) == 4
    names = {f.name for f in (written[0] / "figures").iterdir()}
    assert names == {"cosines.png", "weights.png", "sweep-clip_high.png", "sweep-kl.png"}


def test_a_page_escapes_what_it_shows(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path).rename(tmp_path / "<b>run&")
    assert main(["replay", str(copy), "--objectives", "grpo", "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "replay.html").read_text()
    assert "<b>" not in text
    assert "&lt;b&gt;run&amp;" in text


def test_without_a_step_the_last_one_is_replayed_and_the_first_mini_batch_clips_nothing(run: Path) -> None:
    found = compute(Request(run=str(run), mini_batch=1, objectives="grpo,gspo"))
    assert found == compute(Request(run=str(run), mini_batch=1, objectives="grpo,gspo")), "twice the same"
    assert (found.step, found.start) == (3, 2)
    assert found.numbers.token_log_std == 0
    assert all(row.clipped_tokens.share == 0 for row in found.numbers.rows)
    assert found.numbers.rows[0].grad_norm == pytest.approx(found.run_grad_norm, rel=1e-6)


def test_experts_and_a_balancing_loss(tmp_path: Path) -> None:
    """Under replay the forwards of the rows use the old experts; the balancing loss is in no row, but in the check."""
    run = make_run(tmp_path, "steps=1", "model.build=tiny_moe", "routing.replay=old", "routing.balance_loss=0.5", "learner.mini_batches=2")  # fmt: skip
    found = compute(Request(run=str(run), objectives="grpo,gspo+clip_high=1e-6"))
    assert found.exact
    assert found.numbers.balanced
    assert found.numbers.grad_norm_in_run == pytest.approx(found.run_grad_norm, rel=1e-6)
    assert found.numbers.rows[0].grad_norm != pytest.approx(found.run_grad_norm, rel=1e-3)
    by_label = {row.label: row for row in found.numbers.rows}
    assert by_label["gspo+clip_high=1e-6"].clipped_tokens.above >= by_label["gspo (run)"].clipped_tokens.above
    assert by_label["grpo"].note == "", "checkpoint 0 is the reference"
    assert by_label["grpo"].loss_kl > 0


def test_without_a_reference_the_penalty_is_left_out_and_that_is_said(run: Path, tmp_path: Path) -> None:
    copy = copy_of(run, tmp_path, without=(0,))
    found = compute(Request(run=str(copy), step=3, objectives="grpo,rloo"))
    by_label = {row.label: row for row in found.numbers.rows}
    assert "without its KL penalty (0.04): the run has kept no reference model" in by_label["grpo"].note
    assert by_label["grpo"].loss_kl == 0
    assert by_label["rloo"].note == ""


REFUSED: dict[str, tuple[list[str], str]] = {
    "a step that is not there": (["--step", "9"], "step 9 cannot be replayed: its replies are not in rollouts/; steps that can be: 1-3"),
    "an objective that is not there": (["--objectives", "grppo"], "no objective 'grppo'"),
    "a setting that is not there": (["--objectives", "grpo+clip=1"], "has no setting 'clip'; did you mean"),
    "a setting of the run": (["--objectives", "grpo+replay"], "routing.replay is no setting of an objective"),
    "a sweep of nothing": (["--sweep", "clip_high"], "is no SETTING=LOW..HIGH[:COUNT]"),
    "a sweep from 0": (["--sweep", "clip_high=0..1"], "LOW must be above 0"),
    "a sweep of a word": (["--sweep", "keep=1..2"], "has no setting 'keep' that is a number; it has: clip_low, clip_high"),
    "a sweep of a setting of another row": (["--sweep", "tau_pos=1..2"], "gspo has no setting 'tau_pos'"),
    "a sweep with no number": (["--sweep", "clip_high=a..b"], "'a' is no number"),
    "a sweep with one point": (["--sweep", "clip_high=1e-3..1e-2:1"], "the count must be from 2"),
    "a sweep given twice": (["--sweep", "kl=1e-3..1e-2", "--sweep", "kl=1..2"], "kl is there twice"),
    "a sweep that a setting cannot take": (["--sweep", "dual_clip=0.5..3"], "dual_clip: must be above 1"),
    "a mini-batch that is not there": (["--mini-batch", "4", "--objectives", "grpo"], "step 3 has 3 mini-batches, not 4"),
    "a folder that cannot be made": (["-o", f"{__file__}/replay"], "test_replay_command.py; choose another"),
    "a device that is not there": (["--device", "tpu"], "model.device"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_in_one_line(run: Path, case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments, message = REFUSED[case]
    assert main(["replay", str(run), "-o", str(tmp_path / "out"), *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_or_would_write_into_one_is_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["replay", str(tmp_path)]) == 1
    assert "not a run directory" in capsys.readouterr().err
    assert main(["replay", str(run), "-o", str(run / "replay")]) == 1
    assert "inside the run directory" in capsys.readouterr().err
    assert main(["replay", str(run), "--seed=1"]) == 1
    assert "unknown option --seed=1" in capsys.readouterr().err


def test_which_steps_can_be_replayed_and_why_the_others_cannot(run: Path, tmp_path: Path, capsys: Any) -> None:
    copy = copy_of(run, tmp_path, without=(0, 1))
    (copy / "rollouts" / "000001.jsonl").unlink()
    assert main(["replay", str(copy), "--step", "2"]) == 1
    assert "step 2 cannot be replayed: no checkpoint before it has the replies of all steps in between; steps that can be: 3 " in capsys.readouterr().err  # fmt: skip
    for file in (copy / "rollouts").iterdir():
        file.unlink()
    assert main(["replay", str(copy)]) == 1
    assert "no step can be replayed: rollouts/ holds no replies" in capsys.readouterr().err


def test_a_run_that_did_not_keep_its_replies(tmp_path: Path, capsys: Any) -> None:
    run = make_run(tmp_path, "steps=1", "log.rollouts=false")
    assert main(["replay", str(run)]) == 1
    assert "log.rollouts was false" in capsys.readouterr().err


def test_a_batch_that_teaches_nothing(tmp_path: Path) -> None:
    """Every reply is worth the same: the gradients are 0, cosines are not there, and both are said."""
    run = make_run(tmp_path, "steps=1", f"reward.functions={tmp_path}/spaces.py:flat")
    out = tmp_path / "out"
    assert main(["replay", str(run), "--sweep", "clip_high=1e-3..1:2", "-o", str(out)]) == 0
    data = json.loads((out / "replay.json").read_text())
    own, dapo = data["rows"][0], next(row for row in data["rows"] if row["label"] == "dapo")
    assert (own["grad_norm"], own["cosine"], own["effective_replies"]) == (0, None, 0)
    assert (dapo["replies"], dapo["loss"]) == (0, 0)
    assert any("is 0: nothing would be learned" in text for text in data["reading"])


def test_a_step_that_learned_nothing_is_refused_and_passed_over_on_the_way(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "same.py").write_text(
        "def same(prompts, completions, **columns):\n    return [0.1] * len(completions)\n"
    )
    run = make_run(tmp_path, "steps=1", "objective.name=dapo", f"reward.functions={tmp_path}/same.py:same")
    assert main(["replay", str(run)]) == 1
    assert "step 1 had no reply to learn from" in capsys.readouterr().err


def test_ranges() -> None:
    assert ranges([3, 1, 2, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges([]) == ""
