"""Objectives of one's own: from components in Python, and from a file that a recipe names."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import evaluate, random_case

import gspo
from gspo.commands.eval import measure_model
from gspo.config import Config
from gspo.errors import ConfigError, TrustError
from gspo.objectives.advantage import centered
from gspo.objectives.aggregate import sequence_sum, token_mean
from gspo.objectives.ratio import token
from gspo.objectives.trust_region import Clip, DropCovariance
from gspo.record.run_dir import read_jsonl
from gspo.trainer import resume, train
from gspo.view.replay.replay import Request, compute

FILE = '''
from dataclasses import dataclass

import torch

import gspo
from gspo.objectives.advantage import advantage_rule, centered
from gspo.objectives.aggregate import ConstantLength
from gspo.objectives.ratio import token
from gspo.objectives.trust_region import Surrogate, TrustRegion


@advantage_rule("group")
def doubled(reward_B, group_B, groups):
    """2 (R - mean) within the group."""
    return 2 * centered(reward_B, group_B, groups)


@dataclass(frozen=True)
class Shrink(TrustRegion):
    """r A / (1 + width |r - 1|)."""

    width: float = 1.0
    mode: str = "both"

    def __call__(self, tokens, log_ratio_N):
        ratio_N = log_ratio_N.exp()
        factor_N = 1 / (1 + self.width * (ratio_N.detach() - 1).abs())
        objective_N = factor_N * ratio_N * tokens.advantage_N
        return Surrogate(objective_N, ratio_N.detach(), torch.zeros_like(ratio_N, dtype=torch.bool))


mine = gspo.Objective(advantage=doubled, ratio=token, trust_region=Shrink(), aggregate=ConstantLength())
other = 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_components_of_the_package_make_an_objective() -> None:
    """Dr.GRPO's advantage with DAPO's range and token mean."""
    objective = gspo.Objective(advantage=centered, ratio=token, trust_region=Clip(0.2, 0.28), aggregate=token_mean)
    case = random_case(0)
    out, grad = evaluate(objective, case, row="dapo")
    want, want_grad = oracle.loss_and_grad("dapo", case.replace(logp_ref=None, logp_sampler=None), kl=0.0)
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-12)
    torch.testing.assert_close(grad, want_grad, rtol=1e-10, atol=1e-14)
    assert gspo.group_advantage(objective, [1.0, 0.0], [0, 0]).tolist() == [0.5, -0.5]
    assert gspo.token_weights(objective, case.mask).sum() == pytest.approx(1.0)


def test_a_rule_may_have_settings() -> None:
    from dataclasses import dataclass

    from gspo.objectives.advantage import AdvantageRule
    from gspo.objectives.objective import change, settings_of

    @dataclass(frozen=True)
    class Scaled(AdvantageRule):
        """strength (R - mean)."""

        strength: float = 1.0

        def __call__(self, reward_B: Any, group_B: Any, groups: int) -> Any:
            return self.strength * centered(reward_B, group_B, groups)

    row = replace(gspo.objective("grpo"), advantage=Scaled())
    assert settings_of(row)["strength"] == 1.0
    changed = change(row, {"strength": 3.0})
    assert gspo.group_advantage(changed, [1.0, 0.0], [0, 0]).tolist() == [1.5, -1.5]
    with pytest.raises(ConfigError, match="strength must be a number"):
        change(row, {"strength": "3"})


def test_a_file_has_settings_like_a_row(file: Path) -> None:
    objective = gspo.objective(f"{file}:mine", width=4.0, max_length=10, kl=0.1)
    assert objective.name == "mine"
    assert objective.trust_region.width == 4.0  # type: ignore[attr-defined]
    assert gspo.group_advantage(objective, [1.0, 0.0], [0, 0]).tolist() == [1.0, -1.0]
    assert copy.deepcopy(objective) == objective == gspo.objective(f"{file}:mine", width=4.0, max_length=10, kl=0.1)
    with pytest.raises(ConfigError, match=r"has no setting 'widh'; did you mean width"):
        gspo.objective(f"{file}:mine", widh=4.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{file}:other", "no gspo.Objective named other; its objectives: mine"),
        ("{file}:missing", "no gspo.Objective named missing"),
        ("{folder}/gone.py:mine", "no file .*gone.py"),
        ("{file}", "write file.py:name"),
        ("{folder}/mine.txt:mine", "file.py:name"),
        ("{broken}:mine", "ZeroDivisionError.*must run on its own"),
    ],
)
def test_a_name_that_is_no_objective(name: str, words: str, file: Path) -> None:
    broken = file.with_name("broken.py")
    broken.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=words):
        gspo.objective(name.format(file=file, folder=file.parent, broken=broken))


def test_a_shape_that_does_not_exist_is_refused(file: Path) -> None:
    file.write_text(FILE.replace("gspo.Objective(", 'gspo.Objective(shape=("soft_overlog",), '))
    with pytest.raises(ConfigError, match="shape must be none, or a list of overlong_filter and soft_overlong"):
        gspo.objective(f"{file}:mine")
    # One name as text is what recipes write.
    file.write_text(FILE.replace("gspo.Objective(", 'gspo.Objective(shape="soft_overlong", '))
    assert gspo.objective(f"{file}:mine").shape == ("soft_overlong",)


def test_a_clip_range_without_its_two_fields_is_refused(file: Path) -> None:
    """A rollback and an adaptive range scale the fields, which would fail in the middle of a run."""
    width = "    width: float = 1.0\n"
    bare = f"{width}\n    @property\n    def clip_range(self):\n        return self.width, self.width\n"
    file.write_text(FILE.replace(width, bare))
    with pytest.raises(ConfigError, match="Shrink: a trust region with a clip_range has the fields clip_low"):
        gspo.objective(f"{file}:mine")


def test_selected_tokens_are_required_if_the_weights_do_not_tell_the_size_of_the_step() -> None:
    region = DropCovariance(select_fraction=0.1)
    mine = gspo.Objective(advantage=centered, ratio=token, trust_region=region, aggregate=sequence_sum)
    case = random_case(0)
    assert region.selection_count(len(case.mask)) == 0 < region.selection_count(int(case.mask.sum()))
    weights = gspo.token_weights(mine, case.mask)
    with pytest.raises(ConfigError, match="also pass selected="):
        gspo.policy_loss(mine, case.logp, case.logp_old, case.advantage, case.mask, weights=weights)


def test_a_run_trains_on_it_and_resumes_only_with_the_same_file(
    tiny: Callable[..., Config], display: Any, file: Path, tmp_path: Path
) -> None:
    config = tiny(f"objective.name={file}:mine", "objective.width=2", "checkpoint.every=1")
    train(config, display)
    run = tmp_path / "run"
    recorded = json.loads((run / "run.json").read_text())["objective"]
    assert (recorded["name"], recorded["trust_region"], recorded["advantage"]) == ("mine", "Shrink", "doubled")
    rows = read_jsonl(run / "metrics.jsonl")
    resume(run, display, steps=4)
    assert read_jsonl(run / "metrics.jsonl")[: len(rows)] == rows
    file.write_text(FILE.replace("return 2 *", "return 3 *"))
    with pytest.raises(TrustError, match=r"objective.name runs .*mine.py \(changed since"):
        resume(run, display, steps=5)
    with pytest.raises(ConfigError, match=r"not the one the run began with"):
        resume(run, display, steps=5, trust_run=True)
    file.write_text(FILE)
    assert resume(run, display, steps=5, trust_run=True).step == 5


def test_a_relative_path_is_resolved_when_the_run_starts(
    tiny: Callable[..., Config], display: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    train(tiny("objective.name=mine.py:mine", "steps=1"), display)
    monkeypatch.chdir("/")
    assert resume(tmp_path / "run", display, steps=2).step == 2


def test_code_of_somebody_elses_run_needs_approval_where_it_would_run(
    tiny: Callable[..., Config], display: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tiny(f"objective.name={file}:mine", "reward.functions=[]", "steps=1"), display)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    ran = tmp_path / "ran"
    file.write_text(FILE + f"open({str(ran)!r}, 'w').close()\n")
    run = tmp_path / "run"
    with pytest.raises(TrustError, match=r"objective\.name"):
        resume(run, display, steps=2)
    request = Request(run=str(run), out=str(tmp_path / "out"))
    with pytest.raises(TrustError, match=r"objective\.name"):
        compute(request)
    assert not ran.exists(), "refused code must not run"
    # Evaluation never reads the objective, so it needs no approval.
    options: dict[str, Any] = {"data": None, "recipe": None, "ks": [1], "samples": 1, "limit": 2, "greedy": False}
    assert len(measure_model(str(run), **options, seed=0, overrides=[]).evaluation.groups) == 2
    assert not ran.exists()


def test_a_replay_evaluates_it_next_to_rows_of_the_table(
    tiny: Callable[..., Config], display: Any, file: Path, tmp_path: Path
) -> None:
    train(tiny(f"objective.name={file}:mine", "steps=2"), display)
    replayed = compute(Request(run=str(tmp_path / "run"), out=str(tmp_path / "out"), objectives="gspo,grpo"))
    labels = {row.label for row in replayed.numbers.rows}
    assert labels == {"mine (run)", "gspo", "grpo"}
