"""Environments of `verifiers`: with a program that stands in for its process, and with the real package.

The real package is used if it is installed here, or in the environment whose Python `GSPO_TESTS_VERIFIERS` names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gspo.build import environment_for
from gspo.config import Config
from gspo.context import RunContext
from gspo.errors import ConfigError, DataError
from gspo.rollout.engine import GenerateOptions
from gspo.serving import verifiers_env, verifiers_worker
from gspo.trainer import train
from gspo.types import Completion, ConversationEnd, Prompt, branch_paths

PYTHON = os.environ.get("GSPO_TESTS_VERIFIERS") or (sys.executable if importlib.util.find_spec("verifiers") else "")
STAND_IN = '''#!{python}
"""Speaks as the worker does: two turns, of which the second begins again if the task says so."""
import json, os, subprocess, sys, time, urllib.request

def call(run, ids, sampling):
    body = json.dumps({{"model": run["model"], "token_ids": ids, "sampling_params": sampling}}).encode()
    headers = {{"Authorization": "Bearer " + run["token"]}}
    address = run["address"].removesuffix("/v1") + "/inference/v1/generate"
    choice = json.load(urllib.request.urlopen(urllib.request.Request(address, body, headers)))["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]

def rollout(run, one):
    prompt = [5, 6, one["task"]["idx"]]
    if one["task"].get("fails"):
        return {{"failure": "a tool is missing"}}
    if one["task"].get("dies"):
        os._exit(3)
    while one["task"].get("hangs"):
        time.sleep(1)
    first, logp = call(run, prompt, one["sampling"])
    branch = {{"token_ids": prompt + first, "sampled": [False] * 3 + [True] * len(first), "logp": [0.0] * 3 + logp}}
    branches = [branch]
    before = prompt + [7] if one["task"].get("rewrites") else branch["token_ids"] + [7, 8]
    second, logp2 = call(run, before, one["sampling"])
    begun = [0.0] * len(before) if one["task"].get("rewrites") else branch["logp"] + [0.0, 0.0]
    mask = [False] * len(before) if one["task"].get("rewrites") else branch["sampled"] + [False, False]
    other = {{"token_ids": before + second, "sampled": mask + [True] * len(second), "logp": begun + logp2}}
    branches = [branch, other] if one["task"].get("rewrites") else [other]
    reward = float(one["task"].get("reward", sum(first) % 7 / 7))
    found = {{"branches": branches, "reward": reward, "truncated": False}}
    return {{**found, "stop": one["task"].get("stop", "")}}

for line in sys.stdin:
    message = json.loads(line)
    if "load" in message:
        id = message["load"]["taskset"]["id"]
        if "pid_file" in message["load"]["taskset"]:
            with open(message["load"]["taskset"]["pid_file"], "w") as file:
                file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        errors = {{"nothing": "no taskset", "seen": str(sorted(os.environ))}}
        print(json.dumps({{"error": errors[id]}} if id in errors else {{"result": {{}}}}), flush=True)
    elif "begin" in message:
        begun = [{{"text": "begin", "token_ids": [5, 6, task["idx"]]}} for task in message["begin"]["tasks"]]
        print(json.dumps({{"result": begun}}), flush=True)
    else:
        for one in message["run"]["rollouts"]:
            print(json.dumps({{"id": one["id"], **rollout(message["run"], one)}}), flush=True)
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bin") / "python"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def configured(tiny: Callable[..., Config], program: str, tmp_path: Path) -> Callable[..., Config]:
    """The config of a run with the stand-in, on these tasks."""

    def make(tasks: Sequence[dict[str, Any]], *overrides: str) -> Config:
        rows = [{"prompt": f"task {i}", "verifiers": {"idx": 10 + i, **task}} for i, task in enumerate(tasks)]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tiny(
            'environment={name = "verifiers", turn_tokens = 5}',
            f'environment.options={{taskset = "made", python = "{program}"}}',
            f'data={{path = "{tmp_path}/tasks.jsonl", answer_field = "", held_out = 0}}',
            "reward.functions=[]",
            "rollout.max_tokens=40",
            "eval.every=0",
            *overrides,
        )

    return make


def logp_of(parts: RunContext, prompt: Prompt, completion: Completion) -> list[float]:
    """The log-probs of the sampled tokens, from a forward pass over each branch."""
    ids = [*prompt.token_ids, *completion.token_ids]
    before = len(prompt.token_ids)
    found: dict[int, float] = {}
    for path in branch_paths(before, len(completion.token_ids), completion.branches):
        with torch.no_grad():
            logits = parts.policy.model(input_ids=torch.tensor([[ids[i] for i in path]])).logits[0].float()
        for at, i in enumerate(path[1:], 1):
            found.setdefault(i, float(logits[at - 1].log_softmax(-1)[ids[i]]))
    return [found[before + i] for i, own in enumerate(completion.sampled) if own]


def sample(parts: RunContext, prompts: Sequence[Prompt], samples: int = 2) -> list[list[Completion]]:
    sampling = parts.config.rollout.sampling
    options = GenerateOptions(samples=samples, sampling=sampling, seed=1, stream="train/1", version=3)
    return parts.engine.generate(prompts, options)


def test_rollouts_become_completions_with_the_engines_log_probs(
    configured: Callable[..., Config], parts_of: Callable[[Config], RunContext]
) -> None:
    parts = parts_of(configured([{}, {"rewrites": True}, {"stop": "max_turns"}, {}]))
    prompts = sorted(parts.problems.train, key=lambda p: p.id)
    assert [p.token_ids for p in prompts] == [(5, 6, 10 + i) for i in range(4)]
    groups = sample(parts, prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            assert completion.version == 3
            assert completion.conversation is not None
            assert len(completion.conversation.turns) == 2
            assert bool(completion.branches) == (prompt.token_ids[-1] == 11)
            expected = logp_of(parts, prompt, completion)
            assert completion.logp_sampler == pytest.approx(expected, abs=1e-3)
            first = completion.conversation.turns[0]
            assert completion.conversation.reward == sum(completion.token_ids[first.start : first.end]) % 7 / 7
        assert group[0].token_ids != group[1].token_ids
    assert groups[2][0].conversation.end is ConversationEnd.TURNS  # type: ignore[union-attr]
    again = sample(parts, prompts)
    assert [[c.token_ids for c in group] for group in again] == [[c.token_ids for c in group] for group in groups]


def test_what_the_taskset_causes_is_unscored(
    configured: Callable[..., Config], parts_of: Callable[[Config], RunContext]
) -> None:
    parts = parts_of(configured([{"fails": True}, {}, {"reward": "nan"}, {}]))
    prompts = sorted(parts.problems.train, key=lambda p: p.id)
    (failed, *_), (good, *_), (unknown, *_) = sample(parts, prompts)[:3]
    assert failed.conversation is not None
    assert failed.conversation.end is ConversationEnd.FAILED
    scores = parts.rewards.score([(prompts[0], [failed]), (prompts[1], [good]), (prompts[2], [unknown])])
    assert "the sum of the rewards is not finite" in str(scores[2][0].failure)
    assert scores[0][0].failure == "raised: environment: a tool is missing"
    assert scores[1][0].reward is not None


@pytest.mark.parametrize(
    ("task", "failure"), [({"dies": True}, "died: environment: its process ended"), ({"hangs": True}, "timeout: ")]
)
def test_a_taskset_that_ends_or_hangs_leaves_its_rollouts_unscored_and_works_again(
    task: dict[str, Any],
    failure: str,
    configured: Callable[..., Config],
    parts_of: Callable[[Config], RunContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that blocks the process keeps `verifiers` from enforcing its own limits."""
    monkeypatch.setattr(verifiers_env, "_GRACE_S", 1.0)
    parts = parts_of(configured([{}, task, {}, {}], "environment.max_seconds=1"))
    prompts = sorted(parts.problems.train, key=lambda p: p.id)
    good, *others = [c.conversation for (c,) in sample(parts, prompts, samples=1)]
    assert good is not None
    assert good.failure is None
    assert all(other is not None and str(other.failure).startswith(failure) for other in others)
    again = [c.conversation for (c,) in sample(parts, prompts[2:], samples=1)]
    assert [one.failure for one in again if one is not None] == [None, None]


def test_a_run_trains_on_them(configured: Callable[..., Config], display: Any) -> None:
    config = configured([{}, {"rewrites": True}] * 4, "steps=2")
    train(config, display)
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2
    assert rows[-1]["grad/norm"] > 0


def test_a_taskset_gets_no_variables_that_are_not_declared(
    configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("MY_SERVICE", "address")

    def seen(*overrides: str) -> str:
        config = configured([{}])
        options = f'environment.options={{taskset = "seen", python = "{config.environment.options["python"]}"}}'
        with ExitStack() as stack, pytest.raises(ConfigError) as error:
            environment_for(configured([{}], options, *overrides), stack)
        return str(error.value)

    assert "PATH" in seen()
    assert "HF_TOKEN" not in seen()
    assert "MY_SERVICE" not in seen()
    assert "MY_SERVICE" in seen('environment.variables=["MY_SERVICE"]')
    assert "no environment variable 'MISSING'" in seen('environment.variables=["MISSING"]')


def test_what_a_taskset_has_started_ends_with_it(configured: Callable[..., Config], tmp_path: Path) -> None:
    python = configured([{}]).environment.options["python"]
    settings = f'{{pid_file = "{tmp_path}/pid"}}'
    with ExitStack() as stack:
        options = f'environment.options={{taskset = "made", python = "{python}", settings = {settings}}}'
        environment_for(configured([{}], options), stack)
        pid = int((tmp_path / "pid").read_text())
        os.kill(pid, 0)
    until = time.monotonic() + 30
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether a process runs. Nobody may have reaped one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_mistakes_are_errors_that_name_the_option(configured: Callable[..., Config], tmp_path: Path) -> None:
    cases = {
        'environment.options={taskset = "nothing", python = "PYTHON"}': "options.taskset: no taskset",
        'environment.options={taskset = "made", path = "PYTHON"}': "options.path: not an option of verifiers",
        'environment.options={python = "PYTHON"}': "options.taskset: name the taskset",
        "environment.memory_mb=7": "environment.memory_mb: has no effect",
        "data.system=Be brief.": "data.system: has no effect",
        'environment.options={taskset = "made", python = "/no/python"}': "options.python: cannot run /no/python",
        f'environment.options={{taskset = "made", python = "{sys.executable}"}}': "verifiers",
    }
    program = configured([{}]).environment.options["python"]
    if importlib.util.find_spec("verifiers"):
        cases.popitem()
    for override, message in cases.items():
        config = configured([{}], override.replace("PYTHON", program))
        with ExitStack() as stack, pytest.raises(ConfigError, match=message):
            environment_for(config, stack)
    with ExitStack() as stack:
        environment = environment_for(configured([{}]), stack)
        assert environment is not None
        prompt = Prompt(id="train/0", content="", text="", token_ids=(1,))
        with pytest.raises(DataError, match="has no field 'verifiers'"):
            environment.open([prompt], _NoTokenizer())


class _NoTokenizer:
    def save_pretrained(self, folder: str) -> None:
        """There is nothing to save."""


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="verifiers is not installed")
def test_a_real_taskset_with_several_turns_trains(
    configured: Callable[..., Config],
    display: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parent / "tasksets")
    file = tmp_path / "count.jsonl"
    command = [PYTHON, verifiers_worker.__file__, "--export", "count_turns", str(file)]
    subprocess.run(command, check=True, timeout=300)
    config = configured(
        [{}],
        f'environment.options={{taskset = "count_turns", python = "{PYTHON}"}}',
        f"data.path={file}",
        "rollout.max_tokens=60",
        "steps=2",
    )
    train(config, display)
    run = Path(config.run_dir)
    rows = [json.loads(line) for line in (run / "rollouts" / "000001.jsonl").read_text().splitlines()]
    assert all(row["status"] == "scored" for row in rows)
    assert all(1 <= len(row["turns"]) <= 3 for row in rows)
    assert any(len(row["turns"]) == 3 for row in rows)
    assert any(0 < row["reward"] < 1 for row in rows)
