"""Redaction finds secrets by value, by name and by shape, and keeps text that only looks like one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.config import Config, check, load
from gspo.errors import ConfigError
from gspo.record.run_dir import RunDir, read_jsonl
from gspo.redact import HIDDEN, known_secrets, redacted, redacted_pieces, redacted_values
from gspo.view.static_page import fill

RANDOM = "aB3dE5fG7hJ9kL1mN2pQ4rS6tU8vW0xYzA1bC2dE"
SHAPES = {
    "OpenAI": f"sk-{RANDOM}",
    "OpenAI project": f"sk-proj-{RANDOM}_{RANDOM}-x",
    "Anthropic": f"sk-ant-api03-{RANDOM}-AA",
    "lower case": "sk-abcdefghijklmnopqrst",
    "Hugging Face": f"hf_{RANDOM[:34]}",
    **{f"GitHub {kind}": f"gh{kind}_{RANDOM[:36]}" for kind in "pousr"},
    "GitHub, fine-grained": f"github_pat_{RANDOM[:22]}_{RANDOM}",
    "GitLab": "glpat-aB3dE5fG7hJ9kL1mN2pQ",
    "AWS": "AKIAIOSFODNN7EXAMPLE",
    "AWS, temporary": "ASIAIOSFODNN7EXAMPLE",
    "Google": f"AIza{RANDOM[:35]}",
    "Slack": "xoxb-123456789012-abcdefABCDEF",
    "JSON Web Token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\n",
}
AROUND = ("{}", "token {} refused", '"{}"', "key={}", "({})", "{}.", "https://host/{}/x", "a\n{}\nb", "x:{}")


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("around", AROUND)
def test_secret_is_redacted_by_shape(name: str, around: str) -> None:
    said = redacted(around.format(SHAPES[name]), ())
    assert SHAPES[name].strip() not in said
    assert RANDOM[:16] not in said
    assert HIDDEN in said


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abc123def456ghi789jkl", "abc123def456ghi789jkl"),
        ("authorization: basic dXNlcjpwYXNzd29yZDE=", "dXNlcjpwYXNzd29yZDE="),
        ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
        ('{"wandb_key": "0123456789abcdef0123456789abcdef01234567"}', "0123456789abcdef"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
        ("api-key: aB3dE5fG7hJ9kL1mN2", "aB3dE5fG7hJ9kL1mN2"),
        ("https://me:pa55word@host/x", "pa55word"),
        ("postgres://me:pa55word@host/x", "pa55word"),
        ("https://host/x?a=1&access_token=abcd&b=2", "abcd"),
    ],
)
def test_secret_is_redacted_by_preceding_text(text: str, secret: str) -> None:
    said = redacted(text, ())
    assert secret not in said
    assert HIDDEN in said


@pytest.mark.parametrize(
    "text",
    [
        "task-abcdefghijklmnopqrstuvwxyz",
        "disk-0123456789abcdef0123",
        "risk-averse",
        "the sk-learn library",
        "desk-sk-short",
        "hf_hub_download",
        "chf_abcdefghijklmnopqrstuvwxyz",
        "ghp_short",
        "AKIA",
        "bearer responsibilities are heavy",
        "basic understanding of things",
        "max_tokens = 1024",
        "pad_token: <|endoftext|>",
        "runs/demo-20260101-120000",
        "d41d8cd98f00b204e9800998ecf8427e",
        "https://host/path?step=3",
        "a@b.org",
        "x = sk - 1",
        "eyJ is how it begins",
        "keyboard: abcdefghijklmnop1",
        "c44229cfd0e1a2b3c4d5e6f708192a3b4c5d6e7f",
    ],
)
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert redacted(text, ()) == text


def test_shell_working_directory_is_not_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PWD": "/home/me/work", "OLDPWD": "/home/me/before", "DB_PWD": "a-password"}.items():
        monkeypatch.setenv(name, value)
    said = redacted("/home/me/work/runs, /home/me/before/x and a-password", known_secrets())
    assert said == f"/home/me/work/runs, /home/me/before/x and {HIDDEN}"


def test_secret_split_across_tokens_is_hidden_in_all_of_them() -> None:
    pieces = ["use ", "sk", "-", "abcdefgh", "ij1234567890", " now", " mysecret", "value"]
    assert redacted_pieces(pieces, ["mysecretvalue"]) == ["use ", *[HIDDEN] * 4, " now", HIDDEN, HIDDEN]
    assert redacted_pieces(["plain", " text"], ["mysecretvalue"]) == ["plain", " text"]


def test_only_secrets_are_removed_from_nested_values() -> None:
    given = {
        "api_key": "abc",
        "steps": 3,
        "deep": [{"what": f"x {SHAPES['AWS']}", "n": None, "t": True}],
        "max_tokens": 5,
    }
    found = redacted_values(given)
    assert found == {
        "api_key": HIDDEN,
        "steps": 3,
        "deep": [{"what": f"x {HIDDEN}", "n": None, "t": True}],
        "max_tokens": 5,
    }


def test_static_page_shows_no_secret_and_stays_valid_html(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>{{ what }}</p><b>end</b>")
    said = fill(tmp_path / "page.html", what=f"{SHAPES['private key']} {SHAPES['AWS']} <i> https://h/?key=abc")
    assert said == f"<p>{HIDDEN}{HIDDEN} &lt;i&gt; https://h/?key={HIDDEN}</p><b>end</b>"


@pytest.mark.parametrize("name", list(SHAPES))
def test_json_redacted_as_text_stays_valid_json(name: str) -> None:
    said = redacted(json.dumps({"a": f"x {SHAPES[name]}", "b": f'https://h/?key=a"{SHAPES[name]}'}), ())
    assert json.loads(said).keys() == {"a", "b"}
    assert RANDOM[:16] not in said


@pytest.mark.parametrize(
    "override",
    [
        f'data.system="use {SHAPES["OpenAI"]}"',
        'rollout.engine_options.url="https://me:pa55word@host"',
        f'name="{SHAPES["GitHub p"]}"',
    ],
)
def test_error_for_a_setting_with_a_secret_names_the_key_and_hides_the_secret(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]) as error:
        load("demo", [override])
    assert "environment variable" in str(error.value)
    assert SHAPES["OpenAI"] not in str(error.value)
    assert "pa55word" not in str(error.value)


def test_shipped_recipes_contain_no_secrets() -> None:
    config = load("demo")
    assert isinstance(config, Config)
    check(config)


def test_run_event_contains_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "by-its-value")
    run = RunDir.create(load("demo", [f"run_dir={tmp_path / 'run'}"]))
    run.event(
        "error", error="E", message=f"{SHAPES['AWS']} and by-its-value refused", steps=[{"x": SHAPES["GitHub p"]}], n=3
    )
    run.close()
    (said,) = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert said["message"] == f"{HIDDEN} and {HIDDEN} refused"
    assert said["steps"] == [{"x": HIDDEN}]
    assert said["n"] == 3
