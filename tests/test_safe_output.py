"""Terminal output contains no control sequences and no secrets."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from shown_runs import make_run, write_lines

from gspo.cli import main
from gspo.record.progress import LiveDisplay, PlainDisplay
from gspo.safe_output import printed, safe_output
from gspo.view.terminal import watch_text

ACTING = {
    "color": "\x1b[31m",
    "clear": "\x1b[2J",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;http://evil\x1b\\",
    "C1 sequence": "\x9b2J",
    "C1 string": "\x9d0;title\x9c",
    "overwritten line": "\r",
    "backspace": "\x08",
    "delete": "\x7f",
    "right to left": "\u202e",
    "isolate": "\u2066",
    "mark": "\u200f",
    "line end": "\u2028",
    "lone surrogate": "\udc80",
    "tag": "\U000e0041",
}
SECRET = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"


def harmless(text: str) -> bool:
    return not any(part in text for value in ACTING.values() for part in value if not part.isprintable())


@pytest.mark.parametrize("name", list(ACTING))
def test_control_characters_are_replaced_and_other_text_is_unchanged(name: str) -> None:
    said = printed(f"before {ACTING[name]} after")
    assert harmless(said)
    assert said.startswith("before \N{REPLACEMENT CHARACTER}")
    assert said.endswith(" after")


def test_text_in_any_script_is_unchanged() -> None:
    text = "näher\t東京 עברית العربية हिन्दी 👩‍👩‍👧 ½ × −1\u00a0%\n"
    assert printed(text) == text


@pytest.mark.parametrize("name", list(ACTING))
def test_file_name_in_an_error_is_sanitized(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"odd{ACTING[name].replace('/', '')}{SECRET}.toml"
    assert main(["train", str(file)]) == 1
    said = capsys.readouterr()
    assert "odd" in said.err
    assert harmless(said.err + said.out)
    assert SECRET not in said.err


def test_setting_name_in_an_error_is_sanitized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text('"\\u001b]0;title\\u0007" = 1\n')
    assert main(["train", str(tmp_path / "recipe.toml")]) == 1
    assert harmless(capsys.readouterr().err)


def test_traceback_is_sanitized(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError(f"\x1b[2J a bug with {SECRET}")

    monkeypatch.setattr("gspo.view.report.write_report", broken)
    assert main(["report", "runs"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "a bug with [hidden]" in said
    assert harmless(said)


def test_streams_are_restored() -> None:
    before = sys.stdout, sys.stderr
    with safe_output():
        assert sys.stdout is not before[0]
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_run_message_is_sanitized(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    display = kind()
    display.message(f"a reward said: {''.join(ACTING.values())} {SECRET}")
    display.close()
    said = capsys.readouterr().out
    assert "a reward said" in said
    assert harmless(said)
    assert SECRET not in said


def test_terminal_view_shows_no_control_characters_of_a_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    write_lines(run / "events.jsonl", [{"event": "error", "error": "\x1b[2JE", "what": f"\x9b2J\u202e\r{SECRET}"}])
    said = io.StringIO()
    watch_text([run], Console(file=said, width=200))
    assert "The run stopped with an error" in said.getvalue()
    assert harmless(said.getvalue())
    assert SECRET not in said.getvalue()


def test_output_printed_during_the_live_display_is_sanitized(capsys: pytest.CaptureFixture[str]) -> None:
    """The live display takes over the streams, so a library's warning is printed through it."""
    with safe_output():
        display = LiveDisplay()
        display.step(1, 2, {}, {"time/step_s": 1.0})
        print(f"a library: {''.join(ACTING.values())} {SECRET}")
        display.close()
    said = capsys.readouterr().out
    assert "a library" in said
    assert SECRET not in said
    for acting in ("\x1b[2J", "\x1b]0;", "\x9b", "\x9d", "\x07", "\x08", "\u202e", "\u2066", "\u2028"):
        assert acting not in said
