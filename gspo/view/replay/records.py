"""The replies of a step, as the run wrote them down, made into groups again.

In: `rollouts/STEP.jsonl` and the run's tokenizer. Out: `StepRecord`. Invariant: learning from these groups is learning from
those of the run, to the bit: rewards and the sampler's log-probabilities are written exactly, prompts are tokenised by
the rule that tokenised them first.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.data.chat import Chat, token_ids_of
from gspo.errors import DataError
from gspo.objectives.objective import Objective
from gspo.objectives.samples import keeps_group
from gspo.rollout.gather import RolloutBatch
from gspo.types import Completion, Group, Prompt, Routes, Score, Status, StopReason
from gspo.view.completions import grouped


@dataclass(frozen=True, kw_only=True)
class LearnRecord:
    """What learning found out about a reply, as the run wrote it down."""

    logp_old: Sequence[float]
    logp_new: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step's replies."""

    gathered: RolloutBatch
    learnt: Mapping[tuple[int, int], LearnRecord]
    """By (group, place in it); replies that were not learned from are not there."""


def read_step(file: Path, tokenizer: Any, *, chat: Chat, objective: Objective, routes: bool) -> StepRecord:
    """Read a step; `objective` is the run's, which kept groups or did not, `routes`: learning needs the sampler's experts."""
    groups = grouped(_lines(file))
    try:
        ids = token_ids_of([members[0]["prompt"] for members in groups], tokenizer, chat=chat)
        made = [_group(file, members, prompt, routes) for members, prompt in zip(groups, ids, strict=True)]
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise error if isinstance(error, DataError) else DataError(f"{file}: holds what no run writes ({type(error).__name__}: {error}); the file is damaged, replay another step") from None  # fmt: skip
    gathered = RolloutBatch(
        groups=tuple(g for g in made if keeps_group(objective, g)),
        discarded=tuple(g for g in made if not keeps_group(objective, g)),
    )
    learnt = {
        (number, place): LearnRecord(logp_old=line["logp_old"], logp_new=line["logp_new"])
        for number, members in enumerate(groups)
        for place, line in enumerate(members)
        if line["trained"]
    }
    return StepRecord(gathered=gathered, learnt=learnt)


NEEDED = ("prompt_id", "sample", "prompt", "text", "token_ids", "stop", "version", "status", "reward", "correct", "parts", "failure", "logp_sampler", "trained")  # fmt: skip


def _lines(file: Path) -> list[dict[str, Any]]:
    found = []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read: {error}; replay another step") from None
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise DataError(f"{file}: line {number}: not JSON; the file is damaged, replay another step") from None
        missing = [key for key in NEEDED if key not in record]
        if record.get("trained"):
            missing += [key for key in ("logp_old", "logp_new") if key not in record]
        if missing:
            raise DataError(f"{file}: line {number}: no {missing[0]}, which a replay needs; the run was made by another version")  # fmt: skip
        if len(record["logp_sampler"]) != len(record["token_ids"]):
            raise DataError(f"{file}: line {number}: {len(record['token_ids'])} tokens, but {len(record['logp_sampler'])} log-probabilities; the file is damaged, replay another step")  # fmt: skip
        found.append(record)
    if not found:
        raise DataError(f"{file}: holds no replies; replay another step")
    return found


def _group(file: Path, members: Sequence[Mapping[str, Any]], prompt_ids: tuple[int, ...], routes: bool) -> Group:
    first = members[0]
    prompt = Prompt(id=first["prompt_id"], content=first["prompt"], text=first["prompt"], token_ids=prompt_ids)
    if routes and any("routes" not in line for line in members):
        raise DataError(f'{file}: holds no experts of the sampler, which routing.replay = "sampler" learned with; the run was made by an older version, and its steps cannot be replayed')  # fmt: skip
    return Group(
        prompt=prompt,
        completions=[_completion(line, _routes(line) if routes else None) for line in members],
        scores=[_score(line) for line in members],
    )


def _completion(line: Mapping[str, Any], routes: Routes | None) -> Completion:
    return Completion(
        prompt_id=line["prompt_id"],
        sample=line["sample"],
        token_ids=tuple(line["token_ids"]),
        text=line["text"],
        logp_sampler=tuple(line["logp_sampler"]),
        stop=StopReason(line["stop"]),
        version=line["version"],
        routes=routes,
    )


def _routes(line: Mapping[str, Any]) -> Routes:
    given = line["routes"]
    experts = zlib.decompress(base64.b64decode(given["experts"]))
    return Routes(experts=experts, layers=given["layers"], top_k=given["top_k"], width=given["width"])


def _score(line: Mapping[str, Any]) -> Score:
    return Score(
        status=Status(line["status"]),
        reward=line["reward"],
        correct=line["correct"],
        parts=line["parts"],
        failure=line["failure"],
    )
