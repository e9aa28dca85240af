"""What a run prints while it trains."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.record.metric_definitions import heading
from gspo.record.notebook import curves_html
from gspo.record.progress import LiveDisplay, PlainDisplay

TRAINED = {"reward/mean": 0.5, "samples/trained": 8, "clip/fraction_tokens": 0.125, "eval/accuracy": 0.25}
IDLE = {"reward/mean": 0.0, "samples/trained": 0}
TIMES = {"time/step_s": 1.0, "time/rollout_s": 1.0}


def test_a_step_that_trained_on_nothing_says_so_and_repeats_no_earlier_number(capsys: Any) -> None:
    display = PlainDisplay()
    display.step(1, 3, TRAINED, TIMES)
    display.step(2, 3, IDLE, TIMES)
    first, second = capsys.readouterr().out.splitlines()
    assert "clipped tokens 12.5%" in first
    assert "trained on nothing" in second
    assert "clipped" not in second
    assert "12.5%" not in second
    assert "held-out 25.0%" in second  # of the last evaluation, which is still the last


def test_a_line_has_the_held_out_reward_where_it_differs_from_the_accuracy(capsys: Any) -> None:
    reward = {"eval/accuracy": 0.0, "eval/reward": 0.25, "eval/reward_low": 0.2, "eval/reward_high": 0.3}
    display = PlainDisplay()
    display.evaluated(reward)
    display.step(
        1, 3, TRAINED | reward | {"eval/reward": 0.5, "eval/amc/accuracy": 0.0, "eval/amc/reward": 0.75}, TIMES
    )
    display.step(2, 3, TRAINED | {"eval/accuracy": 0.25, "eval/reward": 0.25, "eval/amc/reward": 0.0}, TIMES)
    first, second = capsys.readouterr().out.splitlines()
    assert "held-out 0.0%  held-out reward 0.250 → 0.500 ±0.050  amc 0.0%  amc reward 0.750" in first
    assert "reward 0." in second
    assert "held-out reward" not in second  # with a reward of 0 or 1 it repeats the accuracy
    assert "amc reward" not in second


def test_the_live_panel_says_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    display = LiveDisplay()
    shown: list[list[tuple[str, str]]] = []
    monkeypatch.setattr(display, "_show", lambda *arguments: shown.append(arguments[-1]))
    display.step(1, 3, TRAINED, TIMES)
    display.step(2, 3, IDLE, TIMES)
    assert ("clipped tokens", "12.5%") in shown[0]
    assert ("trained on", "nothing") in shown[1]


def test_the_live_panel_shows_no_markup_when_a_message_is_printed(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # the live panel is drawn on a terminal only
    display = LiveDisplay().start()
    display.step(1, 3, TRAINED, TIMES)
    display.message("saved in runs/[bold]")
    display.close()
    out = capsys.readouterr().out
    assert "clipped tokens" in out
    assert "saved in runs/[bold]" in out
    assert "[dim]" not in out
    assert out.count("[bold]") == out.count("runs/[bold]")


def test_a_notebook_has_a_curve_of_the_held_out_reward_with_partial_credit() -> None:
    rows = [{"step": s, "eval/accuracy": 0.0, "eval/reward": 0.1 * s} for s in (0, 1, 2)]
    title = f"{heading('eval/reward')} <b>0.2</b>"
    assert title in curves_html(rows)
    same = [{**row, "eval/reward": row["eval/accuracy"]} for row in rows]
    assert heading("eval/reward") not in curves_html(same)


def test_the_remaining_time_is_estimated_anew_after_a_rollback(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 10 s each. Six of nine are done, and the run goes back to step 1."""
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    display = PlainDisplay()
    for step in (1, 2, 3, 4, 5, 6, 2):
        now += 10
        display.step(step, 9, TRAINED, TIMES | {"time/step_s": 10.0})
    assert capsys.readouterr().out.splitlines()[-1].endswith("left 1:10")


def test_tokens_per_second_are_those_of_the_time_in_which_they_were_sampled(capsys: Any) -> None:
    """With `rollout.max_lag` a step itself samples nothing, and a batch from a checkpoint has no sampling time."""
    display = PlainDisplay()
    for times in ({"time/rollout_s": 2.0}, {"lag/rollout_s": 4.0}, {}):
        display.step(1, 3, TRAINED | {"tokens/generated": 100}, {"time/step_s": 1.0} | times)
    rates = [line.partition("tokens/s ")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rates == ["50", "25", "-"]
