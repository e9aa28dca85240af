"""Rebuild the groups of a step from the completions that the run recorded.

In: `rollouts/STEP.jsonl` and the run's tokenizer. Out: `StepRecord`. Invariant: training on these groups is bitwise
identical to training on those of the run: rewards and the sampler's log-probs are recorded exactly, and prompts are
tokenized by the same code.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import aliases
from gspo.data.chat import Chat, token_ids_of
from gspo.errors import DataError
from gspo.objectives.objective import Objective
from gspo.objectives.samples import keeps_group
from gspo.rollout.gather import RolloutBatch
from gspo.types import (
    Branch,
    Completion,
    Conversation,
    ConversationEnd,
    Group,
    Prompt,
    Routes,
    Score,
    Status,
    StopReason,
    Turn,
)
from gspo.view.completions import grouped


@dataclass(frozen=True, kw_only=True)
class LearnRecord:
    """The log-probs of a trained completion, as the run recorded them; empty if the run did not compute them."""

    logp_old: Sequence[float]
    logp_new: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A step's completions."""

    rollouts: RolloutBatch
    trained: Mapping[tuple[int, int], LearnRecord]
    """By (group, index in the group), for the completions that were trained on."""

    @property
    def complete(self) -> bool:
        """Whether the run computed every completion that it trained on. Earlier versions always did."""
        return all(record.logp_old for record in self.trained.values())


def read_step(
    file: Path, tokenizer: Any, *, chat: Mapping[str, Chat], objective: Objective, routes: bool
) -> StepRecord:
    """Read a step.

    `chat` is `data.chat` of each data source. `objective` is the run's, which decides which groups are kept. `routes`
    reads the sampler's experts, too.
    """
    lines_by_group = grouped(_lines(file))
    try:
        # Token ids of prompts are not recorded; the same code gives the same ids.
        groups = []
        for lines in lines_by_group:
            own = chat[lines[0].get("source", "")]
            (prompt_ids,) = token_ids_of([lines[0]["prompt"]], tokenizer, chat=own)
            groups.append(_group(file, lines, prompt_ids, routes))
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
        raise DataError(
            f"{file}: invalid record ({type(error).__name__}: {error}); the file is damaged, replay another step"
        ) from None
    batch = RolloutBatch(
        # Kept groups come first in the file, so their numbers are those of the training batch.
        groups=tuple(g for g in groups if keeps_group(objective, g)),
        discarded=tuple(g for g in groups if not keeps_group(objective, g)),
    )
    trained = {
        (number, index): LearnRecord(logp_old=line.get("logp_old", ()), logp_new=line.get("logp_new", ()))
        for number, lines in enumerate(lines_by_group)
        for index, line in enumerate(lines)
        if line["trained"]
    }
    return StepRecord(rollouts=batch, trained=trained)


REQUIRED_FIELDS = (
    "prompt_id",
    "sample",
    "prompt",
    "text",
    "token_ids",
    "stop",
    "version",
    "status",
    "reward",
    "correct",
    "parts",
    "failure",
    "logp_sampler",
    "trained",
)


def _lines(file: Path) -> list[dict[str, Any]]:
    records = []
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot read the file: {error}; replay another step") from None
    # splitlines also splits at U+2028 and similar characters, but a run writes those as escapes.
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = aliases.record(json.loads(line))
        # AttributeError: the line is valid JSON, but not an object.
        except (ValueError, AttributeError):
            raise DataError(f"{file}: line {number}: not JSON; the file is damaged, replay another step") from None
        missing = [key for key in REQUIRED_FIELDS if key not in record]
        if record.get("trained") and record.get("computed", True):
            missing += [key for key in ("logp_old", "logp_new") if key not in record]
        if missing:
            raise DataError(
                f"{file}: line {number}: no {missing[0]}, which a replay needs; another version of gspo wrote the file"
            )
        _check_lengths(f"{file}: line {number}", record)
        records.append(record)
    if not records:
        raise DataError(f"{file}: has no completions; replay another step")
    return records


def _check_lengths(where: str, record: Mapping[str, Any]) -> None:
    """Every token is sampled or not, and every sampled one has a log-prob."""
    tokens = len(record["token_ids"])
    sampled = record.get("sampled", [1] * tokens)
    problem = ""
    if not isinstance(sampled, list) or len(sampled) != tokens or not all(own in (0, 1) for own in sampled):
        problem = f"sampled must be a 0 or 1 for each of the {tokens} tokens"
    elif len(record["logp_sampler"]) != sum(sampled):
        problem = f"{sum(sampled)} tokens, but {len(record['logp_sampler'])} log-probs"
    elif not _branches_fit(record.get("branches", []), tokens):
        problem = "branches must be (start, parent, shared) of parts in order, each with a parent before it"
    if problem:
        raise DataError(f"{where}: {problem}; the file is damaged, replay another step")


def _branches_fit(branches: Any, tokens: int) -> bool:
    start = 0
    for number, branch in enumerate(branches):
        if not isinstance(branch, list) or len(branch) != 3 or not all(type(n) is int for n in branch):
            return False
        if not start <= branch[0] <= tokens or not -1 <= branch[1] < number or (branch[1] < 0) != (number == 0):
            return False
        start = branch[0]
    return True


def _group(file: Path, lines: Sequence[Mapping[str, Any]], prompt_ids: tuple[int, ...], routes: bool) -> Group:
    first = lines[0]
    # The recorded text is what the model saw, after the chat template, so it is not applied again.
    prompt = Prompt(
        id=first["prompt_id"],
        content=first["prompt"],
        text=first["prompt"],
        token_ids=prompt_ids,
        source=first.get("source", ""),
    )
    if routes and any("routes" not in line for line in lines):
        raise DataError(
            f'{file}: the sampler\'s experts are not recorded, which routing.replay = "sampler" trains with; an older '
            "version of gspo wrote the run, and its steps cannot be replayed"
        )
    return Group(
        prompt=prompt,
        completions=[_completion(line, _routes(line) if routes else None) for line in lines],
        scores=[_score(line) for line in lines],
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
        spans=tuple((version, first) for version, first in line.get("spans", ())),
        routes=routes,
        sampled=tuple(map(bool, line.get("sampled", ()))),
        thinking_cut=line.get("thinking_cut", False),
        conversation=_conversation(line) if "turns" in line else None,
        branches=tuple(Branch(start=s, parent=p, shared=n) for s, p, n in line.get("branches", ())),
    )


def _conversation(line: Mapping[str, Any]) -> Conversation:
    turns = tuple(
        Turn(
            start=turn["start"],
            end=turn["end"],
            reward=turn["reward"],
            calls=tuple(turn["calls"]),
            failed_calls=turn["failed_calls"],
            other_format=turn.get("other_format", ""),
        )
        for turn in line["turns"]
    )
    return Conversation(turns=turns, end=ConversationEnd(line["end"]), failure=line["failure"])


def _routes(line: Mapping[str, Any]) -> Routes:
    routes = line["routes"]
    experts = zlib.decompress(base64.b64decode(routes["experts"]))
    return Routes(experts=experts, layers=routes["layers"], top_k=routes["top_k"], width=routes["width"])


def _score(line: Mapping[str, Any]) -> Score:
    return Score(
        status=Status(line["status"]),
        reward=line["reward"],
        correct=line["correct"],
        parts=line["parts"],
        step_rewards=tuple((at, value) for at, value in line.get("step_rewards", ())),
        failure=line["failure"],
    )
