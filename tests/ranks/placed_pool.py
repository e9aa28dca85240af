"""Reward workers on a cluster, for `test_cluster_runs.py`: `placed_pool.py ADDRESS FOLDER` prints two lines of JSON.

The first compares them with workers of this machine. The second has the scores of a batch during which the test kills a
raylet. Two processes, as in a run: one has reserved the places, the other one has the pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.cluster import connect
from gspo.config import RewardConfig
from gspo.reward.reward import RewardPool
from gspo.types import Completion, Prompt, StopReason

NAMES = ("pool", "places")
REWARD = """
import os, time
from pathlib import Path

def score(prompts, completions, **columns):
    here = Path(__file__).parent
    with open(here / "raylets", "a") as file:
        print(os.environ.get("RAY_RAYLET_PID"), file=file)
    for text in completions:
        if text == "raise":
            raise KeyError("no such column")
        if text == "die":
            os._exit(3)
        if text == "hang":
            time.sleep(600)
        while text == "wait" and not (here / "go").exists():
            time.sleep(0.02)
    return [1.0 if text in ("good", "wait") else 0.0 for text in completions]
"""


def groups(*texts: Sequence[str]) -> list[tuple[Prompt, list[Completion]]]:
    made = []
    for number, own in enumerate(texts):
        prompt = Prompt(id=f"train/{number}", content="What?", text="What?", token_ids=(1, 2), columns={})
        completions = [
            Completion(
                prompt_id=prompt.id,
                sample=i,
                token_ids=(i,),
                text=text,
                logp_sampler=(-1.0,),
                stop=StopReason.EOS,
                version=0,
            )
            for i, text in enumerate(own)
        ]
        made.append((prompt, completions))
    return made


def results(pool: RewardPool, *texts: Sequence[str]) -> list[list[Any]]:
    """Status and reward of each completion, or why it has none: for a hang, without the time it took."""
    scores = [score for group in pool.score(groups(*texts)) for score in group]
    return [[score.status.value, score.reward if score.failure is None else known(score.failure)] for score in scores]


def known(failure: str) -> str:
    return "hang" if failure.startswith(("timeout", "not_run")) else failure


def reserve(address: str, folder: str) -> None:
    with connect.joined(address, namespace=NAMES[0]) as ray:
        group = ray.util.placement_group([{"CPU": 1}] * 2, strategy="SPREAD", name=NAMES[1])
        assert group.wait(timeout_seconds=60)
        subprocess.run([sys.executable, __file__, address, folder, "pool"], check=True)


def score(address: str, folder: Path) -> None:
    file = folder / "mine.py"
    file.write_text(REWARD)
    cluster = {"address": address, "namespace": NAMES[0], "rewards": NAMES[1], "places": 2}
    mixed = (["good", "bad"], ["good", "raise"], ["die", "good"], ["hang", "good"], ["bad", "good"])
    functions = (f"{file}:score",)
    found = {}
    for name, where in (("local", None), ("placed", cluster)):
        (folder / "raylets").unlink(missing_ok=True)
        with RewardPool(RewardConfig(functions=functions, workers=2, timeout_s=15.0), cluster=where) as pool:
            found[name] = [results(pool, *mixed), results(pool, ["good"] * 3)]
            found[name].append(sorted(known(fault.failure) for fault in pool.new_faults()))
    raylets = (folder / "raylets").read_text().split()
    print(json.dumps(found | {"raylets": raylets}), flush=True)
    with RewardPool(RewardConfig(functions=functions, workers=2, timeout_s=60.0), cluster=cluster) as pool:
        print(json.dumps(results(pool, *[["wait"] * 4] * 3)), flush=True)


if __name__ == "__main__":
    if sys.argv[3:]:
        score(sys.argv[1], Path(sys.argv[2]))
    else:
        reserve(*sys.argv[1:])
