"""The replies of a step, down to the token. In: `rollouts/STEP.jsonl` and the run's tokenizer. Out: groups, replies, tokens.

Invariant: only files named by a step number within the run's own `rollouts` are read, links are not followed, and long
text is cut and said to be cut: what the model wrote is data, whatever it looks like.
"""

from __future__ import annotations

import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.errors import panics_as_errors
from gspo.redact import known_secrets, redacted_pieces
from gspo.types import UNIFORM_TOLERANCE
from gspo.view.safe_files import open_regular, read_regular

LARGEST = 1 << 28
"""Bytes of a rollouts file that is still opened."""
KEPT = 1 << 25
"""Bytes of rollouts files that are kept parsed, beside the last one."""
EXCERPT = 240
LONGEST = 100_000
"""Characters of a prompt or reply that are shown."""
MOST_TOKENS = 10_000
"""Tokens of a reply that are shown."""
MOST_RECORDS = 50_000
"""Lines of a rollouts file that are read: a short line costs many times its size once it is parsed."""
MOST_LISTED = 2000
"""Replies or groups of a step that are listed."""

Record = Mapping[str, Any]


class Replies:
    """The replies of one run."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "rollouts"
        self._pieces = TokenTexts(run)
        self._parsed: OrderedDict[tuple[int, int, int], list[Record]] = OrderedDict()

    def steps(self) -> list[int]:
        """Steps whose replies are there."""
        try:
            names = [] if self.folder.is_symlink() else os.listdir(self.folder)
        except OSError:
            return []
        return sorted(int(n[:-6]) for n in names if re.fullmatch(r"[0-9]{6,9}\.jsonl", n))

    def of(self, step: int) -> list[Record]:
        """Every reply of a step, in the order of the file; empty if there are none."""
        if self.folder.is_symlink():
            return []
        try:
            file = open_regular(self.folder / f"{step:06d}.jsonl")
        except OSError:
            return []
        with file:
            status = os.fstat(file.fileno())
            key = (step, status.st_mtime_ns, status.st_size)
            if key not in self._parsed:
                if status.st_size > LARGEST:
                    return []
                self._parsed[key] = _records(file.read())
        self._parsed.move_to_end(key)
        while len(self._parsed) > 1 and sum(size for _, _, size in self._parsed) > KEPT:
            self._parsed.popitem(last=False)
        return self._parsed[key]

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The groups of a step with a line on each of their replies."""
        return [_group(number, records) for number, records in enumerate(grouped(self.of(step))[:MOST_LISTED])]

    def find(self, step: int, *, text: str = "", only: str = "", order: str = "") -> dict[str, Any]:
        """Replies of a step that match, in an order: `only` and `order` are names of `FILTERS` and `ORDERS`."""
        records = [
            (group, number, record)
            for group, members in enumerate(grouped(self.of(step)))
            for number, record in enumerate(members)
        ]
        wanted, typical = text.casefold(), _typical(self.of(step))
        found = [
            item
            for item in records
            if (not only or FILTERS[only].holds(item[2], typical))
            and (not wanted or wanted in f"{item[2].get('prompt', '')}\n{item[2].get('text', '')}".casefold())
        ]
        if order:
            found.sort(key=lambda item: ORDERS[order](item[2]), reverse=True)
        return {
            "total": len(records),
            "found": len(found),
            "replies": [
                {"group": g, "number": n, "prompt": _cut(r.get("prompt"), EXCERPT), **_line(r)}
                for g, n, r in found[:MOST_LISTED]
            ],
        }

    def reply(self, step: int, group: int, number: int) -> dict[str, Any] | None:
        """One reply with its tokens; None if there is no such reply."""
        groups = grouped(self.of(step))
        if not (0 <= group < len(groups) and 0 <= number < len(groups[group])):
            return None
        record = groups[group][number]
        ids = [int(i) for i in record["token_ids"] or ()][:MOST_TOKENS]
        places = [(g, n) for g, members in enumerate(groups) for n in range(len(members))]
        at = places.index((group, number))
        return {
            **_line(record),
            "group": group,
            "number": number,
            "replies": len(groups[group]),
            "previous": places[at - 1] if at else None,
            "next": places[at + 1] if at + 1 < len(places) else None,
            "prompt": _cut(record.get("prompt"), LONGEST),
            "text": _cut(record.get("text"), LONGEST),
            "version": record.get("version"),
            "parts": record["parts"],
            "failure": record.get("failure"),
            "shaped_reward": record.get("shaped_reward"),
            "tokens": ids,
            "pieces": self._pieces.of(ids),
            "cut": max(0, len(record.get("token_ids") or ()) - MOST_TOKENS),
            **{name: list(record[name])[:MOST_TOKENS] for name in TOKEN_FIELDS if record.get(name)},
        }


TOKEN_FIELDS = ("logp_sampler", "logp_old", "logp_new", "logp_ref", "clipped_tokens", "flipped_experts")
"""What a record may hold for each token."""


def grouped(records: Sequence[Record]) -> list[list[Record]]:
    """Groups stand one after the other, and the first reply of each is number 0; a prompt may come twice."""
    groups: list[list[Record]] = []
    for record in records:
        if not groups or record.get("sample") == 0 or record.get("prompt_id") != groups[-1][0].get("prompt_id"):
            groups.append([])
        groups[-1].append(record)
    return groups


# ------------------------------------------------------------------------------------------------- finding


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A kind of reply worth reading."""

    label: str
    holds: Callable[[Record, float], bool]
    """Of a reply, given the length that half of the step's replies exceed."""


FILTERS = {
    "wrong_long": Filter(label="wrong but long", holds=lambda r, typical: r.get("correct") is False and _length(r) > typical),
    "right_short": Filter(label="right and short", holds=lambda r, typical: r.get("correct") is True and _length(r) <= typical),
    "clipped_positive": Filter(label="clipped, although better than its group", holds=lambda r, _: _clipped(r) and (r.get("advantage") or 0) > 0),
    "clipped": Filter(label="clipped", holds=lambda r, _: _clipped(r)),
    "truncated": Filter(label="cut at the limit", holds=lambda r, _: r.get("stop") == "length"),
    "unscored": Filter(label="unscored", holds=lambda r, _: r.get("status") == "unscored"),
    "left_out": Filter(label="not learned from", holds=lambda r, _: not r.get("trained")),
    "flipped": Filter(label="experts flipped", holds=lambda r, _: any(r.get("flipped_experts") or ())),
}  # fmt: skip

ORDERS: dict[str, Callable[[Record], float]] = {
    "advantage": lambda r: _number(r.get("advantage")),
    "ratio": lambda r: abs(math.log(_ratio(r))),
    "length": lambda r: float(_length(r)),
    "reward": lambda r: _number(r.get("reward")),
}
"""What replies can be sorted by, the most first."""


def _typical(records: Sequence[Record]) -> float:
    lengths = sorted(map(_length, records))
    return lengths[len(lengths) // 2] if lengths else 0.0


def _length(record: Record) -> int:
    return len(record.get("token_ids") or ())


def _clipped(record: Record) -> bool:
    return (record.get("clipped_fraction") or 0) > 0


def _ratio(record: Record) -> float:
    ratio = record.get("sequence_ratio")
    return float(ratio) if ratio and math.isfinite(ratio) and ratio > 0 else 1.0


def _number(value: Any) -> float:
    return float(value) if value is not None else -math.inf


# ------------------------------------------------------------------------------------------------- lines


def _records(data: bytes) -> list[Record]:
    import orjson

    found: list[Record] = []
    for line in data.split(b"\n", MOST_RECORDS)[:-1]:
        try:
            record = orjson.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(_sound(record))
    return found


TEXTS = ("prompt_id", "prompt", "text", "stop", "status", "left_out", "failure")
NUMBERS = ("sample", "version", "reward", "shaped_reward", "advantage", "sequence_ratio", "clipped_fraction")
FLAGS = ("correct", "trained")


def _sound(raw: Record) -> Record:
    """The fields of a record, each of its own kind or None, so that nothing further on can meet another."""
    made: dict[str, Any] = {key: _if(raw.get(key), str) for key in TEXTS}
    made |= {key: _if(raw.get(key), int, float) for key in NUMBERS}
    made |= {key: _if(raw.get(key), bool) for key in FLAGS}
    made |= {key: _list(raw.get(key)) for key in ("token_ids", *TOKEN_FIELDS)}
    parts = raw.get("parts")
    made["parts"] = {k: _if(v, int, float) for k, v in parts.items()} if isinstance(parts, dict) else {}
    return made


def _if(value: Any, *kinds: type) -> Any:
    return value if isinstance(value, kinds) else None


def _list(value: Any) -> list[Any] | None:
    """A list of numbers."""
    return value if isinstance(value, list) and all(isinstance(v, int | float) for v in value) else None


def _group(number: int, records: Sequence[Record]) -> dict[str, Any]:
    rewards = [float(r["reward"]) for r in records if r.get("reward") is not None]
    correct = [bool(r["correct"]) for r in records if r.get("correct") is not None]
    uniform = not rewards or max(rewards) - min(rewards) <= UNIFORM_TOLERANCE * max(1.0, *map(abs, rewards))
    reasons = {r.get("left_out") for r in records if not r.get("trained")}
    return {
        "group": number,
        "prompt_id": records[0].get("prompt_id"),
        "prompt": _cut(records[0].get("prompt"), EXCERPT),
        "replies": [_line(r) for r in records],
        "uniform": uniform,
        "correct": sum(correct),
        "judged": len(correct),
        "discarded": "not mixed" in reasons,
        "reward": sum(rewards) / len(rewards) if rewards else None,
    }


def _line(record: Record) -> dict[str, Any]:
    """What a list shows of a reply."""
    return {
        "prompt_id": record.get("prompt_id"),
        "sample": record.get("sample"),
        "excerpt": _cut(record.get("text"), EXCERPT),
        "length": _length(record),
        "stop": record.get("stop"),
        "status": record.get("status"),
        "reward": record.get("reward"),
        "correct": record.get("correct"),
        "trained": record.get("trained"),
        "left_out": record.get("left_out"),
        "advantage": record.get("advantage"),
        "sequence_ratio": record.get("sequence_ratio"),
        "clipped_fraction": record.get("clipped_fraction"),
        "flips": sum(record.get("flipped_experts") or ()),
    }


def _cut(text: Any, most: int) -> str:
    text = str(text or "")
    return text if len(text) <= most else text[:most] + " …"


# ------------------------------------------------------------------------------------------------- tokens


class TokenTexts:
    """The text of single tokens, by the tokenizer that the run (or its newest checkpoint) carries."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self._tokenizer: Any = None

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """The piece of text that each token adds; None without a tokenizer."""
        tokenizer = self._loaded()
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=False)
        pieces = []
        for token in ids:
            try:
                with panics_as_errors():
                    pieces.append(stream.step(tokenizer, token) or "")
            except Exception:
                # Bytes that are no text end a stream; the next token begins a new one.
                stream = DecodeStream(skip_special_tokens=False)
                pieces.append("\N{REPLACEMENT CHARACTER}")
        return redacted_pieces(pieces, known_secrets())

    def _loaded(self) -> Any:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            checkpoints = sorted((self.run / "checkpoints").glob("[0-9]*"), reverse=True)
            for folder in (self.run / "tokenizer", *checkpoints):
                try:
                    with panics_as_errors():
                        self._tokenizer = Tokenizer.from_str(read_regular(folder / "tokenizer.json"))
                    break
                except Exception:
                    # A missing or damaged file: the next one may do. The library raises plain Exceptions.
                    continue
        return self._tokenizer
