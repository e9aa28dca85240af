"""The completions of a step or of its evaluations, down to the token.

In: `rollouts/STEP.jsonl` or `evaluations/STEP.jsonl`, and the run's tokenizer. Out: groups, completions, tokens.
Invariant: only files named by a step number in these folders of the run are read, links are not followed, and long text
is truncated with a mark. Model output is data, whatever it looks like.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import aliases
from gspo.errors import panics_as_errors
from gspo.redact import known_secrets, redacted_pieces
from gspo.safe_files import open_regular, read_regular
from gspo.types import UNIFORM_TOLERANCE
from gspo.view.run_reader import LONGEST_NAME, bounded

LARGEST_FILE = 1 << 28
"""Size limit of a file of completions in bytes."""
CACHE_BYTES = 1 << 25
"""File bytes whose parsed records are cached. The newest file is always cached."""
EXCERPT = 240
LONGEST_TEXT = 100_000
"""Displayed characters of a prompt or completion."""
MOST_TOKENS = 10_000
"""Displayed tokens of a completion."""
MOST_RECORDS = 50_000
"""Lines read from a file of completions. A short line takes many times its size once it is parsed."""
MOST_LISTED = 2000
"""Listed completions or groups of a step."""
LONGEST_COLUMN = 4000
"""Displayed characters of a column of the row."""
MOST_COLUMNS = 50
"""Displayed columns of a row."""

Record = Mapping[str, Any]


class Completions:
    """The completions of one run: those of `rollouts/`, or of another folder with the same records."""

    def __init__(self, run: Path, folder: str = "rollouts") -> None:
        self.folder = run / folder
        self._pieces = TokenTexts(run)
        self._cache: OrderedDict[tuple[int, int, int], list[Record]] = OrderedDict()

    def steps(self) -> list[int]:
        """Steps with recorded completions."""
        try:
            names = [] if self.folder.is_symlink() else os.listdir(self.folder)
        except OSError:
            return []
        # Exactly the names that a run writes: a half-written file ends in .tmp.
        return sorted(int(n[:-6]) for n in names if re.fullmatch(r"[0-9]{6,9}\.jsonl", n))

    def of(self, step: int) -> list[Record]:
        """All completions of a step in file order; empty if there are none."""
        if self.folder.is_symlink():
            return []
        try:
            file = open_regular(self.folder / f"{step:06d}.jsonl")
        except OSError:
            return []
        with file:
            status = os.fstat(file.fileno())
            # The key includes time and size, so a file that is rewritten by a resumed run is parsed again.
            key = (step, status.st_mtime_ns, status.st_size)
            if key not in self._cache:
                if status.st_size > LARGEST_FILE:
                    return []
                self._cache[key] = _records(file.read())
        self._cache.move_to_end(key)
        while len(self._cache) > 1 and sum(size for _, _, size in self._cache) > CACHE_BYTES:
            self._cache.popitem(last=False)
        return self._cache[key]

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The groups of a step with a summary of each completion."""
        return [_group(number, records) for number, records in enumerate(grouped(self.of(step))[:MOST_LISTED])]

    def find(self, step: int, *, text: str = "", only: str = "", order: str = "") -> dict[str, Any]:
        """Matching completions of a step, sorted; `only` and `order` are names of `FILTERS` and `ORDERS`."""
        records = [
            (group, number, record)
            for group, members in enumerate(grouped(self.of(step)))
            for number, record in enumerate(members)
        ]
        wanted = text.casefold()
        median = _median_length(self.of(step))
        found = [
            item
            for item in records
            if (not only or FILTERS[only].holds(item[2], median))
            and (not wanted or wanted in f"{item[2].get('prompt', '')}\n{item[2].get('text', '')}".casefold())
        ]
        if order:
            # Stable, so completions of equal value stay in the order of the file.
            found.sort(key=lambda item: ORDERS[order](item[2]), reverse=True)
        return {
            "total": len(records),
            "found": len(found),
            "completions": [
                {"group": g, "number": n, "prompt": truncate(r.get("prompt"), EXCERPT), **summary(r)}
                for g, n, r in found[:MOST_LISTED]
            ],
        }

    def completion(self, step: int, group: int, number: int) -> dict[str, Any] | None:
        """One completion with its tokens; `None` if it does not exist."""
        groups = grouped(self.of(step))
        if not (0 <= group < len(groups) and 0 <= number < len(groups[group])):
            return None
        record = groups[group][number]
        ids = [int(i) for i in record["token_ids"] or ()][:MOST_TOKENS]
        positions = [(g, n) for g, members in enumerate(groups) for n in range(len(members))]
        at = positions.index((group, number))
        return {
            **summary(record),
            "group": group,
            "number": number,
            "completions": len(groups[group]),
            "previous": positions[at - 1] if at else None,
            "next": positions[at + 1] if at + 1 < len(positions) else None,
            "prompt": truncate(record.get("prompt"), LONGEST_TEXT),
            "text": truncate(record.get("text"), LONGEST_TEXT),
            "version": record.get("version"),
            "parts": record["parts"],
            "failure": record.get("failure"),
            "answer": record["answer"],
            "columns": record["columns"],
            "shaped_reward": record.get("shaped_reward"),
            "tokens": ids,
            "pieces": self._pieces.of(ids),
            "omitted_tokens": max(0, len(record.get("token_ids") or ()) - MOST_TOKENS),
            **({"turns": record["turns"]} if record["turns"] else {}),
            **({"branches": record["branches"]} if record["branches"] else {}),
            **({"sampled": record["sampled"][:MOST_TOKENS]} if record["sampled"] else {}),
            **{name: _per_token(record, name)[:MOST_TOKENS] for name in TOKEN_FIELDS if record.get(name)},
        }


TOKEN_FIELDS = ("logp_sampler", "logp_old", "logp_new", "logp_ref", "clipped_tokens", "flipped_experts")
"""Fields of a record with one entry per sampled token."""


def _per_token(record: Record, name: str) -> list[Any]:
    """A field with one entry per token of the completion; `None` at tokens that the model did not sample."""
    values = iter(record[name])
    return [next(values, None) if own else None for own in record["sampled"]] if record["sampled"] else list(values)


def grouped(records: Sequence[Record]) -> list[list[Record]]:
    """Split records into groups.

    Groups are contiguous and start with sample 0. The prompt id alone is not enough: a prompt may be sampled twice.
    """
    groups: list[list[Record]] = []
    for record in records:
        if not groups or record.get("sample") == 0 or record.get("prompt_id") != groups[-1][0].get("prompt_id"):
            groups.append([])
        groups[-1].append(record)
    return groups


# ------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A selection of completions."""

    label: str
    holds: Callable[[Record, float], bool]
    """Takes a completion and the median length of the step's completions."""


FILTERS = {
    "wrong_long": Filter(
        label="wrong and long", holds=lambda r, median: r.get("correct") is False and _length(r) > median
    ),
    "right_short": Filter(
        label="correct and short", holds=lambda r, median: r.get("correct") is True and _length(r) <= median
    ),
    "clipped_positive": Filter(
        label="clipped with a positive advantage", holds=lambda r, _: _clipped(r) and (r.get("advantage") or 0) > 0
    ),
    "clipped": Filter(label="clipped", holds=lambda r, _: _clipped(r)),
    "truncated": Filter(label="truncated", holds=lambda r, _: r.get("stop") == "length"),
    "stopped": Filter(label="ended with a stop string", holds=lambda r, _: r.get("stop") == "stop"),
    "failed_calls": Filter(
        label="with failed tool calls", holds=lambda r, _: any(t["failed_calls"] for t in r.get("turns") or ())
    ),
    "thinking_cut": Filter(label="with their thinking cut", holds=lambda r, _: bool(r.get("thinking_cut"))),
    "unscored": Filter(label="unscored", holds=lambda r, _: r.get("status") == "unscored"),
    "dropped": Filter(label="not trained on", holds=lambda r, _: not r.get("trained")),
    "flipped": Filter(label="with expert flips", holds=lambda r, _: any(r.get("flipped_experts") or ())),
}

ORDERS: dict[str, Callable[[Record], float]] = {
    "advantage": lambda r: _number(r.get("advantage")),
    "ratio": lambda r: abs(math.log(_ratio(r))),
    "length": lambda r: float(_length(r)),
    "reward": lambda r: _number(r.get("reward")),
}
"""Sort keys of completions, in descending order."""


def _median_length(records: Sequence[Record]) -> float:
    lengths = sorted(map(_length, records))
    return lengths[len(lengths) // 2] if lengths else 0.0


def _length(record: Record) -> int:
    """Sampled tokens."""
    return sum(record["sampled"]) if record["sampled"] else len(record.get("token_ids") or ())


def _clipped(record: Record) -> bool:
    return (record.get("clipped_fraction") or 0) > 0


def _ratio(record: Record) -> float:
    ratio = record.get("sequence_ratio")
    # The file is untrusted, and a logarithm follows.
    return float(ratio) if ratio and math.isfinite(ratio) and ratio > 0 else 1.0


def _number(value: Any) -> float:
    return float(value) if value is not None else -math.inf


# ------------------------------------------------------------------------------------------------- records


def _records(data: bytes) -> list[Record]:
    import orjson

    found: list[Record] = []
    # The last part is either empty or not read: the rest beyond the limit, or an incomplete line.
    for line in data.split(b"\n", MOST_RECORDS)[:-1]:
        try:
            record = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(_validate(aliases.record(record)))
    return found


TEXT_FIELDS = ("prompt_id", "set", "prompt", "text", "stop", "end", "status", "drop_reason", "failure")
NUMBER_FIELDS = ("sample", "version", "reward", "shaped_reward", "advantage", "sequence_ratio", "clipped_fraction")
FLAG_FIELDS = ("correct", "trained", "computed", "thinking_cut", "greedy")


def _validate(raw: Record) -> Record:
    """The known fields of an untrusted record, each of its expected type or `None`."""
    record: dict[str, Any] = {key: _only(raw.get(key), str) for key in TEXT_FIELDS}
    record |= {key: _only(raw.get(key), int, float) for key in NUMBER_FIELDS}
    record |= {key: _only(raw.get(key), bool) for key in FLAG_FIELDS}
    record |= {key: _number_list(raw.get(key)) for key in ("token_ids", *TOKEN_FIELDS)}
    record["sampled"] = _mask(raw.get("sampled"), len(record["token_ids"] or ()))
    record["turns"] = _turns(raw.get("turns"), len(record["token_ids"] or ()))
    record["branches"] = _branches(raw.get("branches"), len(record["token_ids"] or ()))
    parts = raw.get("parts")
    record["parts"] = {k: _only(v, int, float) for k, v in parts.items()} if isinstance(parts, dict) else {}
    columns = raw.get("columns")
    shown = list(columns.items())[:MOST_COLUMNS] if isinstance(columns, dict) else []
    record["columns"] = {k[:LONGEST_NAME]: _column(v) for k, v in shown}
    record["answer"] = None if raw.get("answer") is None else _column(raw["answer"])
    return record


def _column(value: Any) -> str:
    """A value of a row as text: JSON, unless it is text."""
    value = bounded(value)
    return truncate(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), LONGEST_COLUMN)


def _only(value: Any, *types: type) -> Any:
    """The value if it has one of the types, else `None`."""
    return value if isinstance(value, types) else None


def _number_list(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) and all(isinstance(v, int | float) for v in value) else None


def _mask(value: Any, length: int) -> list[int] | None:
    """A list of 0 and 1 of that length, else `None`: all tokens were sampled."""
    valid = isinstance(value, list) and len(value) == length and all(type(v) is int and v in (0, 1) for v in value)
    return value if valid else None


MOST_TURNS = 1000
"""Displayed turns of a conversation."""


def _branches(value: Any, tokens: int) -> list[list[int]]:
    """Start, parent and shared tokens of each branch, in order; empty if they are not valid."""
    found = value[:MOST_TURNS] if isinstance(value, list) else []
    numbers = all(isinstance(b, list) and len(b) == 3 and all(type(n) is int for n in b) for b in found)
    return found if numbers and all(0 <= start <= tokens for start, _, _ in found) else []


def _turns(value: Any, tokens: int) -> list[dict[str, Any]]:
    """The turns of a conversation, in order; empty if they are not valid."""
    found = []
    end = 0
    for turn in value[:MOST_TURNS] if isinstance(value, list) else ():
        if not isinstance(turn, dict):
            return []
        calls = turn.get("calls")
        start, stop = turn.get("start"), turn.get("end")
        if type(start) is not int or type(stop) is not int or not end <= start <= stop <= tokens:
            return []
        found.append(
            {
                "start": start,
                "end": stop,
                "reward": _only(turn.get("reward"), int, float),
                "calls": [str(c)[:100] for c in calls[:20]] if isinstance(calls, list) else [],
                "failed_calls": _only(turn.get("failed_calls"), int) or 0,
                "other_format": str(turn.get("other_format") or "")[:100],
            }
        )
        end = stop
    return found


def _group(number: int, records: Sequence[Record]) -> dict[str, Any]:
    rewards = [float(r["reward"]) for r in records if r.get("reward") is not None]
    correct = [bool(r["correct"]) for r in records if r.get("correct") is not None]
    uniform = not rewards or max(rewards) - min(rewards) <= UNIFORM_TOLERANCE * max(1.0, *map(abs, rewards))
    reasons = {r.get("drop_reason") for r in records if not r.get("trained")}
    return {
        "group": number,
        "prompt_id": records[0].get("prompt_id"),
        "prompt": truncate(records[0].get("prompt"), EXCERPT),
        "answer": None if records[0]["answer"] is None else truncate(records[0]["answer"], EXCERPT),
        "completions": [summary(r) for r in records],
        "uniform": uniform,
        "correct": sum(correct),
        "judged": len(correct),
        "discarded": "uniform" in reasons,
        "reward": sum(rewards) / len(rewards) if rewards else None,
    }


def summary(record: Record) -> dict[str, Any]:
    """A completion as shown in lists."""
    return {
        "prompt_id": record.get("prompt_id"),
        "sample": record.get("sample"),
        "excerpt": truncate(record.get("text"), EXCERPT),
        "length": _length(record),
        "stop": record.get("stop"),
        "end": record.get("end"),
        "turns": len(record.get("turns") or ()),
        "thinking_cut": bool(record.get("thinking_cut")),
        "status": record.get("status"),
        "reward": record.get("reward"),
        "correct": record.get("correct"),
        "greedy": bool(record.get("greedy")),
        "trained": record.get("trained"),
        "drop_reason": record.get("drop_reason"),
        "computed": record.get("computed") is not False,
        "advantage": record.get("advantage"),
        "sequence_ratio": record.get("sequence_ratio"),
        "clipped_fraction": record.get("clipped_fraction"),
        "flips": sum(record.get("flipped_experts") or ()),
    }


def truncate(text: Any, most: int) -> str:
    """Text of at most `most` characters, with a mark if it was longer."""
    text = str(text or "")
    return text if len(text) <= most else text[:most] + " …"


# ------------------------------------------------------------------------------------------------- tokens


class TokenTexts:
    """The text of single tokens, from the tokenizer of the run or its newest checkpoint."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._tokenizer: Any = None

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The piece of text that each token adds; `None` without a tokenizer."""
        tokenizer = self._load()
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        # A character may consist of several tokens; a stream holds it back until it is complete.
        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            try:
                with panics_as_errors():
                    pieces.append(stream.step(tokenizer, token) or "")
            except Exception:
                # Invalid UTF-8 breaks the stream, so the next token starts a new one.
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        # Over the whole text: a secret may be split between tokens.
        return redacted_pieces(pieces, known_secrets())

    def _load(self) -> Any:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            checkpoints = sorted((self.run / "checkpoints").glob("[0-9]*"), reverse=True)
            for folder in (self.run / "tokenizer", *checkpoints):
                try:
                    with panics_as_errors():
                        self._tokenizer = Tokenizer.from_str(read_regular(folder / "tokenizer.json"))
                    break
                except Exception:
                    # The file is missing or damaged, so try the next one. The library raises plain Exceptions.
                    continue
        return self._tokenizer
