"""Reading of runs and completions: state, curves, groups, filters, tokens, secrets."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shown_runs import completion, make_run, metrics, uncomputed, write_lines

from gspo.redact import HIDDEN, known_secrets, redacted, redacted_values, sounds_secret
from gspo.view.completions import FILTERS, LARGEST_FILE, LONGEST_COLUMN, LONGEST_TEXT, Completions
from gspo.view.dashboard.watchlist import Watchlist
from gspo.view.run_reader import RunReader


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "made")


def test_the_dashboard_does_not_import_torch() -> None:
    """It starts quickly, and on machines without torch."""
    code = (
        "import sys, gspo.view.dashboard.server, gspo.view.report, gspo.view.terminal; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("last", "state"),
    [
        ({"event": "stop", "signal": None}, "finished"),
        ({"event": "stop", "signal": 15}, "stopped"),
        ({"event": "error"}, "failed"),
        ({"event": "checkpoint"}, "ended"),
    ],
)
def test_the_state_follows_the_last_event(run: Path, last: dict[str, object], state: str) -> None:
    with (run / "events.jsonl").open("a") as out:
        out.write(json.dumps(last) + "\n")
    watched = RunReader(run)
    watched.refresh()
    assert watched.state == state


def test_a_locked_run_is_running_and_reading_it_does_not_take_the_lock(run: Path) -> None:
    watched = RunReader(run)
    with (run / ".lock").open("w") as trainer:
        fcntl.flock(trainer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        watched.refresh()
        assert watched.state == "running"
    assert watched.state == "finished"
    with (run / ".lock").open("w") as trainer:
        watched.refresh()
        assert watched.state == "finished"
        fcntl.flock(trainer, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_curves_and_phases_equal_the_files(run: Path) -> None:
    watched = RunReader(run)
    watched.refresh()
    found = watched.curves(100)
    assert found["curves"]["reward/mean"]["x"] == list(range(1, 13))
    assert found["curves"]["reward/mean"]["y"] == pytest.approx([0.3 + 0.01 * s for s in range(1, 13)])
    assert found["curves"]["eval/accuracy"] == {"x": [0], "y": [0.3]}
    assert found["phases"]["y"]["other"] == pytest.approx([0.05] * 12)
    part = watched.curves(100, x="tokens/sampled", first=3000, last=5000)["curves"]["reward/mean"]["x"]
    assert part == [3000, 4000, 5000]
    assert watched.row_of(5)["time/learn_s"] == 0.4
    assert watched.row_of(99) == {}


def test_the_held_out_reward_is_a_curve_unless_it_repeats_the_accuracy(tmp_path: Path) -> None:
    for accuracy, shown in ((0.25, False), (0.0, True)):
        run = make_run(tmp_path / str(accuracy), steps=0)
        row = {"step": 0, "tokens/sampled": 0, "eval/accuracy": accuracy, "eval/reward": 0.25, "eval/reward_low": 0.2}
        (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        watched = RunReader(run)
        watched.refresh()
        curves = watched.curves(10)["curves"]
        assert curves["eval/accuracy"]["y"] == [accuracy]
        assert ("eval/reward" in curves) == ("eval/reward_low" in curves) == shown


def test_the_version_changes_with_every_file(run: Path) -> None:
    watched = RunReader(run)
    watched.refresh()
    seen = {watched.version}
    for name in ("metrics.jsonl", "timings.jsonl", "events.jsonl"):
        with (run / name).open("a") as out:
            out.write('{"step": 13, "event": "x"}\n')
        watched.refresh()
        seen.add(watched.version)
    assert len(seen) == 4


def test_a_deleted_run_is_gone_and_can_come_back(run: Path) -> None:
    watched = RunReader(run)
    watched.refresh()
    run.rename(run.parent / "away")
    watched.refresh()
    assert watched.state == "gone"
    assert watched.curves(10)["curves"] == {}
    (run.parent / "away").rename(run)
    watched.refresh()
    assert len(watched.metrics) == 13


def test_incomplete_missing_or_invalid_files_are_no_error(tmp_path: Path) -> None:
    run = tmp_path / "odd"
    run.mkdir()
    (run / "config.toml").write_text("not = [toml")
    (run / "events.jsonl").write_text('[1]\n{"event": "start"}\nrubbish\n{"event": "to')
    (run / "environment.json").write_text("[]")
    watched = RunReader(run)
    watched.refresh()
    assert [e["event"] for e in watched.events] == ["start"]
    assert watched.settings == {}
    assert watched.environment == {}
    assert watched.findings() == []


# ------------------------------------------------------------------------------------------------- completions


def test_groups_are_uniform_mixed_or_discarded(tmp_path: Path) -> None:
    records = [
        *(completion("train/1", i, "x") for i in range(4)),
        *(
            completion("train/2", i, "y", reward=1.0, correct=True, trained=False, drop_reason="uniform")
            for i in range(2)
        ),
        *(completion("train/1", i, "z", reward=0.5) for i in range(2)),
    ]
    run = make_run(tmp_path / "made", completions=records)
    groups = Completions(run).groups(5)
    assert [(g["prompt_id"], len(g["completions"])) for g in groups] == [("train/1", 4), ("train/2", 2), ("train/1", 2)]
    kinds = [(g["uniform"], g["discarded"], g["correct"]) for g in groups]
    assert kinds == [(False, False, 2), (True, True, 2), (True, False, 1)]


EXAMPLES = {
    "wrong_long": completion("p", 0, "w" * 30),
    "right_short": completion("p", 1, "r"),
    "clipped_positive": completion("p", 1, "c" * 10, clipped_fraction=1.0, advantage=1.0),
    "clipped": completion("p", 0, "d" * 10, clipped_fraction=0.5, correct=None),
    "truncated": completion("p", 0, "t" * 10, stop="length", correct=None),
    "stopped": completion("p", 0, "s" * 10, stop="stop", correct=None),
    "failed_calls": completion(
        "p", 0, "a" * 10, correct=None, turns=[{"start": 0, "end": 10, "reward": None, "calls": [], "failed_calls": 1}]
    ),
    "thinking_cut": completion("p", 0, "h" * 10, thinking_cut=True, correct=None),
    "unscored": completion("p", 0, "u" * 10, status="unscored", reward=None, correct=None, failure="raised: x"),
    "dropped": completion("p", 0, "l" * 10, trained=False, drop_reason="alone", correct=None),
    "flipped": completion("p", 0, "f" * 10, flipped_experts=[0] * 9 + [2], correct=None),
}


def test_each_filter_finds_only_its_kind(tmp_path: Path) -> None:
    completions = Completions(make_run(tmp_path / "made", completions=list(EXAMPLES.values())))
    assert set(EXAMPLES) == set(FILTERS)
    for name in FILTERS:
        found = [r["excerpt"][0] for r in completions.find(5, only=name)["completions"]]
        also = {"clipped": ["c", "d"], "right_short": ["r", "c"]}
        assert found == also.get(name, [EXAMPLES[name]["text"][0]])


def test_search_and_order(tmp_path: Path) -> None:
    texts = {"Alpha": 1.1, "beta beta": 0.5, "gamma": 1.0}
    records = [completion("train/1", i, text, sequence_ratio=r) for i, (text, r) in enumerate(texts.items())]
    completions = Completions(make_run(tmp_path / "made", completions=records))
    assert [r["excerpt"] for r in completions.find(5, text="ALPHA")["completions"]] == ["Alpha"]
    assert completions.find(5, text="what is train/1")["found"] == 3
    assert [r["excerpt"] for r in completions.find(5, order="ratio")["completions"]] == ["beta beta", "Alpha", "gamma"]
    assert completions.find(5, order="length")["completions"][0]["excerpt"] == "beta beta"
    assert completions.find(5, text="nowhere")["completions"] == []


def test_tokens_that_were_not_sampled_have_no_values(tmp_path: Path) -> None:
    """The result of a tool in the middle of a completion, say. An invalid mask is ignored."""
    record = completion("train/1", 0, "abcdef", sampled=[1, 1, 0, 0, 1, 1]) | {
        name: [-0.1, -0.2, -0.3, -0.4] for name in ("logp_sampler", "logp_old", "logp_new")
    }
    other = completion("train/2", 0, "abcde")
    odd = [completion("train/3", 0, "abc", sampled=mask) for mask in ([1, 0], [1, 2, 0], [True, False, True], "110")]
    completions = Completions(make_run(tmp_path / "made", completions=[record, other, *odd]))
    found = completions.completion(5, 0, 0)
    assert found is not None
    assert found["sampled"] == [1, 1, 0, 0, 1, 1]
    assert found["logp_old"] == [-0.1, -0.2, None, None, -0.3, -0.4]
    assert found["length"] == 4
    assert completions.find(5, order="length")["completions"][0]["excerpt"] == "abcde"
    for number in range(2, 6):
        shown = completions.completion(5, number, 0)
        assert shown is not None
        assert "sampled" not in shown
        assert shown["logp_old"] == [-0.5] * 3


def test_a_completion_that_was_not_computed_has_no_values(tmp_path: Path) -> None:
    records = [completion("train/1", 0, "abc"), uncomputed("train/1", 1, "abcd")]
    completions = Completions(make_run(tmp_path / "made", completions=records))
    shown, hidden = (completions.completion(5, 0, number) for number in (0, 1))
    assert shown is not None
    assert hidden is not None
    assert (shown["computed"], hidden["computed"]) == (True, False)
    assert hidden["trained"]
    assert hidden["sequence_ratio"] is None
    assert hidden["clipped_fraction"] is None
    assert not {"logp_old", "logp_new", "clipped_tokens"} & hidden.keys()
    assert [r["number"] for r in completions.find(5, order="ratio")["completions"]] == [0, 1]


def test_long_text_is_truncated_and_a_huge_file_is_not_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made", completions=[completion("train/1", 0, "x" * 5_000_000)])
    completions = Completions(run)
    assert len(completions.groups(5)[0]["completions"][0]["excerpt"]) < 300
    found = completions.completion(5, 0, 0)
    assert found is not None
    assert len(found["text"]) <= LONGEST_TEXT + 2
    os.truncate(run / "rollouts" / "000006.jsonl", LARGEST_FILE + 1)
    assert completions.of(6) == []


def test_the_expected_answer_and_the_columns_are_shown_as_text(tmp_path: Path) -> None:
    row: dict[str, Any] = {
        "answer": 42,
        "columns": {"level": "easy", "numbers": [3, {"é": None}], "tests": "x" * 10**6},
    }
    records = [completion("train/1", 0, "a", **row), completion("train/2", 0, "b")]
    completions = Completions(make_run(tmp_path / "made", completions=records))
    found, without = completions.completion(5, 0, 0), completions.completion(5, 1, 0)
    assert found is not None
    assert without is not None
    assert found["answer"] == "42"
    assert found["columns"] | {"tests": ""} == {"level": "easy", "numbers": '[3, {"é": null}]', "tests": ""}
    assert len(found["columns"]["tests"]) == LONGEST_COLUMN + 2
    assert (without["answer"], without["columns"]) == (None, {})
    assert [group["answer"] for group in completions.groups(5)] == ["42", None]


def test_only_step_files_in_the_run_directory_are_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    secret = tmp_path / "secret.jsonl"
    write_lines(secret, [completion("secret", 0, "secret")])
    (run / "rollouts" / "000007.jsonl").symlink_to(secret)
    (run / "rollouts" / "notes.jsonl").write_text("{}\n")
    completions = Completions(run)
    assert completions.of(7) == []
    assert completions.steps() == [5, 6, 7]
    assert completions.completion(5, 0, -1) is None
    assert completions.completion(5, 9, 0) is None


def test_token_texts_concatenate_to_the_completion(tmp_path: Path) -> None:
    """Also if a character spans several byte tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    text = "añ €😀 b"
    ids = core.encode(text).ids
    assert len(ids) > len(text)
    run = make_run(tmp_path / "made", completions=[completion("p", 0, text, token_ids=ids)])
    assert Completions(run).completion(5, 0, 0)["pieces"] is None  # type: ignore[index]
    (run / "tokenizer").mkdir()
    core.save(str(run / "tokenizer" / "tokenizer.json"))
    found = Completions(run).completion(5, 0, 0)
    assert found is not None
    assert len(found["pieces"]) == len(ids)
    assert "".join(found["pieces"]) == text


# ------------------------------------------------------------------------------------------------- watch list and
# secrets


def test_a_directory_of_runs_is_scanned_without_following_links(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "elsewhere" / "private")
    make_run(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "link").symlink_to(outside)
    found = Watchlist([tmp_path / "runs"])
    assert list(found.runs) == ["one"]
    make_run(tmp_path / "runs" / "two words & more")
    found._scanned = -1e9
    found.scan()
    assert list(found.runs) == ["one", "two-words-more"]


def test_runs_with_the_same_name_get_distinct_names(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run") for name in "ab"]
    assert list(Watchlist([*runs, runs[0]]).runs) == ["run", "run-2"]


def test_secrets_are_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", 'hf_"abcdefgh\\12345')
    assert redacted('x hf_"abcdefgh\\12345 y', known_secrets()) == f"x {HIDDEN} y"
    assert (
        redacted("see https://user:pa55@host/x?a=1&token=abc", []) == f"see https://{HIDDEN}@host/x?a=1&token={HIDDEN}"
    )
    tree = {
        "log": {"api_key": "k", "max_tokens": 5, "list": [{"password": "p"}]},
        "headers": {"X-Api-Key": "x", "Accept": "json"},
        "empty_secret": "",
        "api_keys": ["k1", "k2"],
        "secret": {"value": "v"},
        "authToken": "t",
        "openai_key": "o",
    }
    assert redacted_values(tree) == {
        "log": {"api_key": HIDDEN, "max_tokens": 5, "list": [{"password": HIDDEN}]},
        "headers": {"X-Api-Key": HIDDEN, "Accept": "json"},
        "empty_secret": "",
        "api_keys": [HIDDEN, HIDDEN],
        "secret": {"value": HIDDEN},
        "authToken": HIDDEN,
        "openai_key": HIDDEN,
    }


@pytest.mark.parametrize(
    "name", ["rollout.max_tokens", "tokenizer", "tokens", "objective.keep", "prompt_field", "micro_batch_tokens"]
)
def test_common_settings_are_not_secret(name: str) -> None:
    assert not sounds_secret(name)


def test_a_long_run_is_sampled_until_it_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    write_lines(run / "metrics.jsonl", [metrics(s) for s in range(1, 9001)])
    watched = RunReader(run)
    watched.refresh(1 << 20)
    assert watched.partial
    assert watched.step == 9000
    assert watched.curves(50)["curves"]["reward/mean"]["x"][-1] > 8000
    assert len(watched.facts().rows) == 40
    while watched.partial:
        watched.refresh(1 << 20)
    assert len(watched.metrics) == 9000


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    """Opening a pipe would block the server forever."""
    run = make_run(tmp_path / "made")
    step_files = ("metrics.jsonl", "timings.jsonl", "events.jsonl", "rollouts/000005.jsonl")
    for name in (*step_files, "config.toml", "environment.json"):
        (run / name).rename(tmp_path / name.replace("/", "-"))
        if kind == "pipe":
            os.mkfifo(run / name)
        elif kind == "directory":
            (run / name).mkdir()
        else:
            (run / name).symlink_to(tmp_path / name.replace("/", "-"))
    watched, completions = RunReader(run), Completions(run)
    watched.refresh(1000)
    assert len(watched.metrics) == len(watched.events) == 0
    assert watched.settings == watched.environment == {}
    assert completions.of(5) == []


def test_no_setting_of_a_run_is_redacted_by_its_name() -> None:
    from gspo.config import help_texts

    assert not [key for key, *_ in help_texts() if sounds_secret(key.rpartition(".")[2])]


INVALID_FIELDS = {
    "token_ids": "abc",
    "reward": "1.0",
    "correct": "yes",
    "parts": [1],
    "logp_old": [[1]],
    "flipped_experts": [[1], 2],
    "sequence_ratio": "1",
    "drop_reason": {"a": 1},
    "prompt_id": 7,
    "advantage": [],
    "stop": None,
    "text": None,
    "sample": "x",
}


@pytest.mark.parametrize("field", INVALID_FIELDS)
def test_a_field_of_another_type_is_no_error(tmp_path: Path, field: str) -> None:
    invalid = completion("p", 0, "x") | {field: INVALID_FIELDS[field]}
    run = make_run(tmp_path / "made", completions=[invalid, completion("p", 1, "y")])
    completions = Completions(run)
    assert sum(len(g["completions"]) for g in completions.groups(5)) == 2
    assert completions.completion(5, 0, 0) is not None
    for only in FILTERS:
        for order in ("advantage", "ratio", "length", "reward"):
            completions.find(5, only=only, order=order)


def test_previous_and_next_completion_cross_groups(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "made", completions=[*(completion("a", i, "x") for i in range(3)), completion("b", 0, "y")]
    )
    completions = Completions(run)
    assert completions.completion(5, 1, 0)["previous"] == (0, 2)  # type: ignore[index]
    assert completions.completion(5, 1, 0)["next"] is None  # type: ignore[index]
    assert completions.completion(5, 0, 2)["next"] == (1, 0)  # type: ignore[index]


def test_only_the_end_of_a_long_event_file_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    write_lines(run / "events.jsonl", [{"event": "e", "step": i, "message": "x" * 3000} for i in range(4000)])
    watched = RunReader(run)
    watched.refresh()
    assert watched.events[-1]["step"] == 3999
    assert len(watched.events) == 500
    assert len(watched.events[0]["message"]) == 1000
    with (run / "events.jsonl").open("a") as out:
        out.write(json.dumps({"event": "new", "step": "odd"}) + "\n" + "[" * 200_000 + "\n")
    watched.refresh()
    assert watched.events[-1] == {"event": "new"}


def test_a_replaced_event_file_of_the_same_length_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "made")
    write_lines(run / "events.jsonl", [{"event": "a"}] * 3)
    watched = RunReader(run)
    watched.refresh()
    (run / "events.jsonl").unlink()
    write_lines(run / "events.jsonl", [{"event": "b"}] * 3)
    watched.refresh()
    assert [e["event"] for e in watched.events] == ["b"] * 3


@pytest.mark.parametrize("without", ["step", "time/step_s"])
def test_files_without_a_step_or_a_time_are_no_error(tmp_path: Path, without: str) -> None:
    run = make_run(tmp_path / "made")
    for name in ("metrics.jsonl", "timings.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        write_lines(run / name, [{k: v for k, v in row.items() if k != without} for row in rows])
    watched = RunReader(run)
    watched.refresh()
    watched.curves(100)
    watched.curves(100, x="tokens/sampled")
    watched.findings()
