"""The HTML page, the figures and `table.json`, from run directories with hand-written metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from by_hand import rows_of, step_row

from gspo.cli import main
from gspo.errors import ConfigError
from gspo.view.compare import figures, record
from gspo.view.compare.comparison import report
from gspo.view.compare.curves import Run, Series
from gspo.view.compare.intervals import Number
from gspo.view.compare.record import Record
from gspo.view.compare.report import write_report
from gspo.view.compare.sentences import verdict
from gspo.view.compare.table import ArmNumbers

Make = Callable[..., Path]
FLIPS = {"routing__flip_fraction": 0.02, "routing__flip_fraction_sampler": 0.001}


def typical_run(label: str, seed: int) -> dict[str, Any]:
    values = {"clip__fraction_tokens": 0.15 if label == "gspo" else 0.0013, **FLIPS}
    if "replay" in label:
        values |= {"routing__flip_fraction": 0.0, "routing__flip_fraction_native": 0.03}
    return {"rows": rows_of(0.3, 0.5 + 0.1 * seed, **values), "objective": label.partition("+")[0]}


def two_seeds(*labels: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(label, seed): typical_run(label, seed) for label in labels for seed in (0, 1)}


class Page(HTMLParser):
    """The page as a browser parses it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def check_self_contained(html: str) -> Page:
    """The page loads nothing and runs no script."""
    page = Page(html)
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base"}
    assert not re.search(r"url\(|@import|https?://|javascript:", html)
    for _, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on")]
        for source in ("src", "href", "srcset"):
            assert (attributes.get(source) or "data:image/png;base64,").startswith(("data:image/png;base64,", "#"))
    return page


def test_the_report_is_written_and_self_contained(comparison: Make) -> None:
    out = comparison(two_seeds("grpo", "grpo+replay", "gspo"))
    written = write_report(out)
    page = check_self_contained((out / "report.html").read_text())
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 5
    assert all(a["alt"] for a in images)
    assert sorted(f.stem for f in (out / "figures").glob("*.png")) == [
        "accuracy",
        "clipping",
        "flips",
        "health",
        "reward",
    ]
    assert all(f.read_bytes().startswith(b"\x89PNG") for f in (out / "figures").iterdir())
    assert "prefers-color-scheme: dark" in (out / "report.html").read_text()
    assert "gspo compare demo --objectives grpo,grpo+replay,gspo --seeds 0,1 --tokens 400" in page.text
    assert "torch 2.13.0" in page.text
    assert "Incomplete" not in page.text
    assert written.notes == []
    assert written.text.splitlines()[3].split()[:4] == ["gspo", "2", "of", "2"]


def test_the_page_and_the_json_show_the_numbers_of_the_runs(comparison: Make) -> None:
    out = comparison(two_seeds("grpo", "gspo"))
    write_report(out)
    data = json.loads((out / "table.json").read_text())
    assert data["complete"] is True
    grpo, gspo = data["arms"]
    assert gspo["after"]["value"] == pytest.approx(0.55)
    assert gspo["clip_ratio"] == pytest.approx(0.15 / 0.0013)
    assert [run["after"] for run in gspo["runs"]] == [0.5, pytest.approx(0.6)]
    assert grpo["flips"]["value"] == pytest.approx(0.02)
    text = Page((out / "report.html").read_text()).text
    assert "55.0 % [0.0 %, 100.0 %]" in text  # two seeds, 12.7 standard errors
    assert "gspo 115 times as many" in text
    assert "0.13 %" in text


def test_text_is_escaped_everywhere(comparison: Make) -> None:
    label = 'gspo+x=$\\frac{$"><script>alert(1)</script><img src=x onerror=alert(1)>'
    out = comparison({("grpo", 0): typical_run("grpo", 0), (label, 0): typical_run("gspo", 0)})
    (out / "recipe.toml").write_text('instruction = "</pre><script>alert(2)</script>"')
    hostile = Record(recipe="<b>bold</b>", overrides=["--x=<i>"], arms=["grpo", label], seeds=[0, 1], tokens=400)
    record.write(out, hostile)
    environment = record.run_path(out, "grpo", 0) / "environment.json"
    environment.write_text(json.dumps({"device": "<script>alert(3)</script>"}))
    log = record.log_path(out, record.run_path(out, "grpo", 1))
    log.parent.mkdir()
    log.write_text("gspo: <script>alert(4)</script>\n")
    write_report(out)
    page = check_self_contained((out / "report.html").read_text())
    expected = (
        "html head meta title style body main h1 h2 p div strong ul li table thead tbody tr th td span figure img "
        "details summary pre small"
    )
    assert {tag for tag, _ in page.tags} <= set(expected.split())
    assert all(f"alert({n})" in page.text for n in (1, 2, 3, 4))


def test_a_dense_model_has_no_flips_and_the_page_gives_the_reason(comparison: Make) -> None:
    rows = rows_of(0.3, 0.5, routing__flip_fraction=None)
    out = comparison({("grpo", 0): {"rows": rows}})
    (out / "figures").mkdir()
    (out / "figures" / "flips.png").touch()
    write_report(out)
    assert not (out / "figures" / "flips.png").exists()
    text = Page((out / "report.html").read_text()).text
    assert "the model is dense" in text
    assert "flipped experts, " not in text


def test_an_unfinished_comparison_is_marked_with_the_reason(comparison: Make) -> None:
    runs = two_seeds("grpo", "gspo")
    failure = {"event": "error", "error": "NumericalError", "message": "step 3: loss is NaN"}
    runs["gspo", 1] |= {"rows": runs["gspo", 1]["rows"][:3], "last_event": failure}
    out = comparison(runs)
    record.write(out, Record(recipe="demo", arms=["grpo", "gspo", "dapo"], seeds=[0, 1], tokens=400))
    log = record.log_path(out, record.run_path(out, "dapo", 0))
    log.parent.mkdir()
    log.write_text("gspo: something is wrong\n\n")
    written = write_report(out)
    text = Page((out / "report.html").read_text()).text
    assert "Incomplete" in text
    assert "gspo, seed 1: at step 2; failed with NumericalError: step 3: loss is NaN" in text
    assert "dapo, seed 0: not started; last log line: gspo: something is wrong" in text
    assert "dapo, seed 1: not started" in text
    assert json.loads((out / "table.json").read_text())["complete"] is False
    assert len(written.notes) == 3
    assert "1 of 2" in written.text


def test_a_comparison_without_runs_has_a_report(comparison: Make) -> None:
    out = comparison({})
    record.write(out, Record(recipe="demo", arms=["grpo", "gspo"], seeds=[0], tokens=None))
    write_report(out)
    page = check_self_contained((out / "report.html").read_text())
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert "not started" in page.text


def test_without_a_common_budget_runs_are_compared_at_the_tokens_that_all_reached(comparison: Make) -> None:
    long = [*rows_of(0.3, 0.5), step_row(5), step_row(6, eval__accuracy=0.9)]
    short = rows_of(0.3, 0.4)
    for row in long:
        row["tokens/sampled"] = 90 * row["step"]
    out = comparison({("a", 0): {"rows": long, "steps": 6}, ("b", 0): {"rows": short, "steps": 4}}, tokens=0)
    written = write_report(out)
    first, second = json.loads((out / "table.json").read_text())["arms"]
    assert first["after"]["value"] == 0.5  # at 360 tokens; 0.9 came at 540
    assert (first["tokens"]["value"], second["tokens"]["value"]) == (360, 400)
    assert "end at 400 sampled tokens" in written.notes[0]
    assert "end at 400 sampled tokens" in Page((out / "report.html").read_text()).text


def test_a_run_that_did_not_reach_the_budget_is_named(comparison: Make) -> None:
    short = [{**row, "tokens/sampled": row["step"] * 10} for row in [*rows_of(0.3, 0.5), *map(step_row, range(5, 9))]]
    out = comparison({("a", 0): {"rows": rows_of(0.3, 0.5)}, ("b", 0): {"rows": short}})
    (note,) = write_report(out).notes
    assert "b-seed-0 (80)" in note
    assert json.loads((out / "table.json").read_text())["arms"][0]["tokens"]["value"] == 400


def test_the_report_starts_no_run(comparison: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = comparison(two_seeds("grpo", "gspo"))
    assert report(str(out)) == 0
    assert "Report:" in capsys.readouterr().out
    assert not (out / "start").exists()
    with pytest.raises(ConfigError, match="no comparison found"):
        report(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("link", ["figures", "figures/reward.png", "logs", "logs/grpo-seed-0.log", "configs"])
def test_nothing_is_written_through_symbolic_links(
    link: str, comparison: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = comparison(two_seeds("grpo"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "reward.png").write_text("precious")
    (out / link).parent.mkdir(exist_ok=True)
    (out / link).symlink_to(outside / "reward.png" if "/" in link else outside)
    for command in (["compare", "--report", str(out)], ["compare", "demo", "--objectives=grpo", f"--out={out}"]):
        assert main(command) == 1
        assert f"{out / link}: is a symlink" in capsys.readouterr().err
    assert [p.read_text() for p in outside.iterdir()] == ["precious"]


@pytest.mark.parametrize("link", ["runs", "start", "runs/gspo-seed-7", "start/seed-7"])
def test_run_directories_of_a_comparison_are_no_links(
    link: str, comparison: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, outside = comparison(two_seeds("grpo")), tmp_path / "outside"
    outside.mkdir()
    if link == "runs":
        (out / "runs").rename(out / "moved")
    (out / link).parent.mkdir(exist_ok=True)
    (out / link).symlink_to(outside)
    for command in (["compare", "--report", str(out)], ["compare", "demo", "--objectives=grpo", f"--out={out}"]):
        assert main(command) == 1
        assert f"{out / link}: is a symlink" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_reports_do_not_need_torch() -> None:
    code = "import sys, gspo.view.compare.report, gspo.view.compare.figures; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ------------------------------------------------------------------------------------------------- claims


def arm(label: str, after: tuple[float, float, float], difference: Number | None) -> ArmNumbers:
    nothing = dict.fromkeys(ArmNumbers.__dataclass_fields__)
    number = Number(value=after[0], low=after[1], high=after[2], seeds=3)
    known = {"label": label, "runs": [], "worse_than_start": 0, "after": number, "difference": difference}
    return ArmNumbers(**{**nothing, **known})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after", "difference", "expected"),
    [
        ((0.9, 0.8, 1.0), Number(value=0.4, low=0.3, high=0.5, seeds=3), "better, by more than the variance"),
        ((0.1, 0.0, 0.2), Number(value=-0.4, low=-0.5, high=-0.3, seeds=3), "worse, by more than the variance"),
        ((0.6, 0.5, 0.7), Number(value=0.1, low=0.05, high=0.15, seeds=3), "more seeds are needed"),
        ((0.9, 0.8, 1.0), Number(value=0.4, low=-0.1, high=0.9, seeds=3), "no significant difference"),
        ((0.9, 0.8, 1.0), Number(value=0.4), "on one seed"),
        ((0.9, 0.8, 1.0), Number(value=0.4, seeds=2), "More problems or seeds are needed"),
        ((0.5, 0.4, 0.6), Number(value=0.0, seeds=2), "without a difference"),
        ((0.9, 0.8, 1.0), None, "cannot be compared"),
    ],
)
def test_an_arm_is_called_better_only_if_the_intervals_support_it(
    after: tuple[float, float, float], difference: Number | None, expected: str
) -> None:
    text = verdict(arm("gspo", after, difference), arm("grpo", (0.5, 0.4, 0.6), None))
    assert expected in text
    assert ("better" in text or "worse" in text) == expected.endswith("than the variance")


def test_seeds_that_agree_exactly_are_judged_by_the_intervals_over_problems(comparison: Make) -> None:
    intervals = (
        {"eval__accuracy_low": 0.95, "eval__accuracy_high": 1.0},
        {"eval__accuracy_low": 0.0, "eval__accuracy_high": 0.05},
    )
    runs = {
        (label, seed): {"rows": [*rows_of(0.3, value)[:-1], step_row(4, eval__accuracy=value, **interval)]}
        for (label, value, interval) in (("grpo", 1.0, intervals[0]), ("dapo", 0.0, intervals[1]))
        for seed in (0, 1)
    }
    out = comparison(runs)
    write_report(out)
    text = Page((out / "report.html").read_text()).text
    assert "dapo ended −100.0 points from grpo, the same on all 2 seeds: worse on each seed, by more than" in text
    assert "without a difference" not in text


def test_an_arm_with_steps_without_a_trainable_sample_is_named(comparison: Make) -> None:
    idle = rows_of(0.3, 0.3, samples__trained=0)
    out = comparison({("grpo", 0): {"rows": rows_of(0.3, 0.5, samples__trained=8)}, ("dapo", 0): {"rows": idle}})
    (note,) = write_report(out).notes
    assert "dapo had no trainable completion in 4 of 4 steps" in note
    text = Page((out / "report.html").read_text()).text
    assert "dapo had no trainable completion in 4 of 4 steps" in text
    assert "steps without a trainable sample" in text
    first, second = json.loads((out / "table.json").read_text())["arms"]
    assert (first["idle"]["value"], second["idle"]["value"]) == (0, 1)


@pytest.mark.parametrize(("arms", "bands", "lines"), [(6, 6, 18), (7, 0, 7)])
def test_many_arms_are_plotted_as_means_only(arms: int, bands: int, lines: int) -> None:
    def run(seed: int) -> Run:
        rows = rows_of(0.3, 0.5 + 0.1 * seed)
        return Run(path=Path(), settings={"seed": seed}, rows=rows, minutes=1.0, finished=True, problem=None)

    figure = figures.accuracy([Series(label=f"arm {i}", runs=[run(0), run(1)]) for i in range(arms)])
    assert figure is not None
    sampled = figure.axes[0]
    assert (len(sampled.collections), len(sampled.lines)) == (bands, lines)
