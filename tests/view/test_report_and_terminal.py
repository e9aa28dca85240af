"""The report file and the terminal view."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from shown_runs import HOSTILE, completion, make_run, write_lines

from gspo.cli import main
from gspo.errors import ConfigError
from gspo.record.run_dir import read_jsonl
from gspo.safe_output import line
from gspo.view.report import write_report
from gspo.view.terminal import BARS, sparkline, watch_text


def text_of(run: Path, width: int = 100) -> str:
    out = io.StringIO()
    watch_text([run], Console(file=out, width=width, force_terminal=False))
    return out.getvalue()


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return dict(json.loads(found[1]))


def test_the_report_contains_the_runs_and_allows_only_its_own_script(tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 4)):
        make_run(tmp_path / name)
        config = (tmp_path / name / "config.toml").read_text()
        (tmp_path / name / "config.toml").write_text(config.replace("seed = 3", f"seed = {seed}"))
    page = write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "r.html").read_text()
    data = data_of(page)
    assert [r["name"] for r in data["runs"]] == ["one", "two"]  # type: ignore[attr-defined]
    assert data["differences"] == [{"key": "seed", "values": ["3", "4"]}]
    scripts = [s for kind, s in re.findall(r"<script([^>]*)>(.*?)</script>", page, re.S) if "json" not in kind]
    assert len(scripts) == 1
    allowed = re.search(r"script-src '([^']+)'", page)
    assert allowed
    assert allowed[1] == "sha256-" + base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert HOSTILE[0] not in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


def test_each_example_completion_is_shown_once(tmp_path: Path) -> None:
    completions = [
        completion("train/1", i, "word " * (i + 1), clipped_fraction=float(i > 3), sequence_ratio=1 + i / 100)
        for i in range(6)
    ]
    run = make_run(tmp_path / "run", completions=completions)
    (run / "rollouts" / "000006.jsonl").rename(run / "rollouts" / "000003.jsonl")
    examples = data_of(write_report([run], tmp_path / "r.html").read_text())["runs"][0]["examples"]  # type: ignore[index]
    places = [(t["step"], t["group"], t["number"]) for t in examples]
    assert len(places) == len(set(places)) >= 4
    assert {s for s, _, _ in places} == {3, 5}
    clipped = next(t for t in examples if "positive advantage" in t["why"])
    assert clipped["number"] == 5


def test_invalid_paths_give_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (["report", str(tmp_path / "nowhere")], "not a run directory"),
        (["report", str(tmp_path / "empty")], "contains no run"),
        (["report", str(run), "-o", str(tmp_path)], "is a directory"),
        (["report", str(run), "-o", str(tmp_path / "no" / "r.html")], "cannot be written"),
        (["watch", "--text", str(tmp_path / "empty")], "contains no run"),
        (["watch", str(tmp_path / "nowhere")], "not a run directory"),
        (["watch", str(run), "--bogus"], "--bogus"),
    ):
        assert main(arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_the_report_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(make_run(tmp_path / "run")), "-o", str(tmp_path / "r.html")]) == 0
    assert str(tmp_path / "r.html") in capsys.readouterr().out


def test_the_terminal_shows_curves_phases_and_findings(tmp_path: Path) -> None:
    text = text_of(make_run(tmp_path / "made", steps=30))
    assert "made  finished, step 30 of 40, 1 s per step" in text
    line = next(line for line in text.splitlines() if line.startswith("reward/mean"))
    assert line.split()[1] == "".join(sorted(line.split()[1]))
    assert "0.6" in line
    # Accuracies are in percent, although they share a panel with the reward.
    accuracy = next(line for line in text.splitlines() if line.startswith("eval/accuracy "))
    assert accuracy.rstrip().endswith(" %")
    assert "sampling 50 %, scoring 5 %, training 40 %" in text
    assert "samples/unscored" not in text


def test_the_terminal_lists_each_metric_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    more = {"length/truncated_fraction": 0.2, "length/penalized_fraction": 0.1}
    write_lines(run / "metrics.jsonl", [row | more for row in read_jsonl(run / "metrics.jsonl")])
    names = [line.split()[0] for line in text_of(run).splitlines() if "/" in line.split(" ")[0]]
    assert "length/truncated_fraction" in names
    assert len(names) == len(set(names))


def test_the_terminal_does_not_repeat_a_clip_fraction_of_an_earlier_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [*read_jsonl(run / "metrics.jsonl"), {"step": 13, "reward/mean": 0.5, "samples/trained": 0}]
    write_lines(run / "metrics.jsonl", rows)
    lines = text_of(run).splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("clip/fraction_tokens")] == ["-"]
    assert [line.split()[-1] for line in lines if line.startswith("reward/mean")] == ["0.5"]
    assert any("1 of the last 13 steps had no trainable samples" in line for line in lines)


def test_a_run_with_a_token_budget_has_no_planned_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert "step 12 of 40" in text_of(run)
    (run / "config.toml").write_text("tokens = 12000\n" + (run / "config.toml").read_text())
    assert "step 12," in text_of(run)


def test_the_terminal_prints_no_control_characters(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    with (run / "events.jsonl").open("a") as out:
        out.write(json.dumps({"event": "error", "error": "E", "message": f"{HOSTILE[5]} [red]markup[/red]"}) + "\n")
    text = text_of(run)
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)
    assert "[red]markup[/red]" in text


def test_a_narrow_terminal_is_no_error(tmp_path: Path) -> None:
    assert "reward" in text_of(make_run(tmp_path / "made"), width=30)


@given(st.lists(st.one_of(st.none(), st.floats(-1e300, 1e300)), min_size=1, max_size=50))
def test_sparklines_keep_order(values: list[float | None]) -> None:
    there = [v for v in values if v is not None]
    if not there:
        return
    line = sparkline(values, min(there), max(there))
    assert len(line) == len(values)
    bars = [BARS.index(c) for c in line if c != " "]
    assert [b for _, b in sorted(zip(there, bars, strict=True))] == sorted(bars)


@given(st.text())
def test_printed_lines_have_no_control_characters(text: str) -> None:
    assert not re.search("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", line(text))


def test_a_failed_report_keeps_the_old_file(tmp_path: Path) -> None:
    old = tmp_path / "r.html"
    old.write_text("old")
    with pytest.raises(ConfigError):
        write_report([tmp_path / "nowhere"], old)
    assert old.read_text() == "old"
