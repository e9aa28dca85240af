"""Extract the final answer of a completion.

In: the text of a completion. Out: the statements of its answer, or `None` if it gives none or retracts it ("72? No.").
Invariant: the thinking is never read, no input raises, and the runtime is bounded for any input.

The final answer is the first of these that the completion has after its thinking:

1. what follows the last `marker`, where the reward has one (then nothing else counts);
2. the contents of `<answer>...</answer>`;
3. the contents of `\\boxed{...}`;
4. what follows the last `####`, to the end of the line;
5. what follows the last "answer is", "answer:", "answer =" or "answer -", to the end of the sentence;
6. what follows the last "A:", unless there are other letters to choose from ("B:");
7. the last sentence that holds a number or a formula.

Thinking ends at the last `</think>`. Thinking that never ends (a truncated completion) leaves no final answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gspo.data.numbers import last_match
from gspo.reward.markup import without_markup
from gspo.reward.qualifiers import ASIDE, SENTENCE, taken_back

# Models use different tags for their thinking.
_CLOSED = re.compile(r"(?i)</(?:think|thinking|thought|reasoning)>")
_OPENED = re.compile(r"(?i)<(?:think|thinking|thought|reasoning)>")
_TAG = re.compile(r"(?i)<(/?)answer>")
# Escaped braces and backslashes are matched so that they are skipped: \} closes no box.
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{|\\[{}\\]|[{}]")
# "The final answer is", "Answer:", "ans =", "Answer ->", "Total - ", "The correct option is B". At most 80 characters
# between noun and verb, so that the search stays linear.
_SAID = re.compile(
    r"(?i)\b(?:answers?\b(?:[^.\n:=]{0,80}?\b(?:is|are|equals)\b|[*_\s]*(?:[:=]>?|->|[→⇒]))|ans\b[*_\s]*[:=]"
    r"|(?:answers?|ans|results?|solution|total)\b[*_]*\s[-\u2013\u2014]{1,2}(?=\s))"
    r"[:*_\s]*(?:(?:approximately|about)\s+)?"
    r"|\bfinal answer\b[*_:#\s]*\n\s*"
    r"|\b(?:correct|right) (?:option|choice) is\s+(?=[*_($]*(?-i:[A-J])\b)"
)
_AFTER_A = re.compile(r"(?:^|(?<=[\n.?!]))\s{0,3}[*_]{0,3}A[*_]{0,3}:[*_]{0,3}\s")
# "B:" or "C)": then "A:" is a choice and not "Answer:".
_OPTION = re.compile(r"(?<![A-Za-z0-9])[B-E][*_]{0,3}[:.)]")
_REASON = re.compile(
    r"(?i),\s+(?!(?:and|or)\b)(?=[a-z]{2})|,?\s\(?(?:because|since)\b"
    rf"|\s\((?!(?:{ASIDE})\))"
    r"(?!(?:or|maybe|perhaps|possibly|alternatively)\b)(?=[^()$\\]*[a-z]{2}[^()$\\]*\))"
)
"""Where an explanation that follows the answer in the same sentence starts."""
# A digit, also of another script, or the start of a formula.
_FORMULA = re.compile(r"[^\W_a-zA-Z]|\$[^$]|\\[(\[a-zA-Z]")
_WHOLE = 200_000
"""Number of characters at the end of a completion that are searched."""


@dataclass(frozen=True, kw_only=True)
class FinalAnswer:
    """A final answer."""

    texts: tuple[str, ...]
    """One statement per box or `<answer>`. Several statements must not contradict each other."""
    formula: bool = False
    """Whether the whole statement is a formula, not a sentence that contains one."""
    marked: bool = True
    """Whether the completion marks it as its answer."""
    after: str = ""
    """The text that follows the answer."""


def after_thinking(text: str) -> str | None:
    """The text after a completion's thinking; `None` if the thinking never ends."""
    closed = last_match(_CLOSED, text)
    rest = text[closed.end() :] if closed else text
    return None if _OPENED.search(rest) else rest


def after_marker(text: str, marker: str) -> str | None:
    """The text after the last marker, or after the thinking without a marker; `None` if there is no such text."""
    said = after_thinking(text)
    if said is None or marker not in said:
        return None
    return said.rpartition(marker)[2] if marker else said


def whole_answer(text: str, marker: str = "") -> str | None:
    """The final answer of a completion that contains nothing else after the marker or the thinking.

    The tags of `<answer>` are removed. `None` if there is no answer, or several that differ.
    """
    said = after_marker(text, marker)
    found = _tagged(said) if said else None
    if found is None:
        return said
    return found.texts[0] if len(found.texts) == 1 else None


def final_answer(text: str, marker: str = "") -> FinalAnswer | None:
    """The final answer of a completion."""
    said = after_marker(text, marker)
    if said is None or not said.strip():
        return None
    # The end, because that is where the final answer is; it bounds the time for a completion of any length.
    said = without_markup(said[-_WHOLE:])
    found = _boxes_in_tags(said) or _boxed(said)
    # After a marker only the first line counts: what follows is an afterthought, which can still retract it.
    if found is None and marker:
        found = _first_line(said)
    found = found or _hashed(said) or _phrase(said) or _after_a(said) or _last_sentence(said)
    return None if found is None or taken_back(found.after) else found


def _first_line(text: str) -> FinalAnswer:
    line, _, after = text.strip().partition("\n")
    return FinalAnswer(texts=(line,), after=after)


def _tagged(text: str) -> FinalAnswer | None:
    contents = []
    start = None
    after = ""
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start = tag.end()
        elif start is not None:
            contents.append(text[start : tag.start()])
            start = None
            after = text[tag.end() :]
    contents += [text[start:]] if start is not None else []
    return FinalAnswer(texts=_distinct(contents), after=after) if contents else None


def _boxes_in_tags(text: str) -> FinalAnswer | None:
    """The contents of `<answer>`, or of the boxes inside it if there are any."""
    found = _tagged(text)
    boxes = [box for content in found.texts if (inner := _boxed(content)) for box in inner.texts] if found else []
    return replace(found, texts=_distinct(boxes), formula=True) if found and boxes else found


def _boxed(text: str) -> FinalAnswer | None:
    """The contents of the outermost closed boxes."""
    found: list[str] = []
    depth = end = 0
    open_at = None
    for token in _BOX.finditer(text):
        if token[0].endswith("{") and token[0] != "\\{":
            depth += 1
            if open_at is None and token[0] != "{":
                open_at = token.end()
                # Braces that were opened before the box do not belong to it.
                depth = 1
        elif token[0] == "}":
            depth -= 1
            if open_at is not None and depth == 0:
                found.append(text[open_at : token.start()])
                open_at = None
                end = token.end()
    return FinalAnswer(texts=_distinct(found), formula=True, after=text[end:]) if found else None


def _hashed(text: str) -> FinalAnswer | None:
    _, mark, after = text.rpartition("####")
    return _first_line(after) if mark and after.strip() else None


def _phrase(text: str) -> FinalAnswer | None:
    said = last_match(_SAID, text)
    return _next_sentence(text[said.end() :]) if said else None


def _after_a(text: str) -> FinalAnswer | None:
    """The text after "A:", as in "Q: ... A: ..."."""
    said = None if _OPTION.search(text) else last_match(_AFTER_A, text)
    return _next_sentence(text[said.end() :]) if said else None


def _next_sentence(text: str) -> FinalAnswer | None:
    sentences = [s for s in SENTENCE.split(text) if s.strip()]
    at = next((n for n, s in enumerate(sentences) if not s.rstrip().endswith(":")), None)  # "as follows:" announces it
    if at is None:
        return None
    stated = _without_reason(sentences[at])
    return FinalAnswer(texts=(stated,), after="\n".join([sentences[at][len(stated) :], *sentences[at + 1 :]]))


def _without_reason(sentence: str) -> str:
    """A sentence without its explanation. A comma between names ("Ann, Bob and Carl have 72") starts none."""
    for cut in _REASON.finditer(sentence):
        stated = sentence[: cut.start()]
        if not (cut[0][0] == "," and sentence[cut.end()].isupper()) or _FORMULA.search(stated):
            return stated
    return sentence


def _last_sentence(text: str) -> FinalAnswer | None:
    found = [s for s in SENTENCE.split(text) if s.strip()]
    at = next((n for n in reversed(range(len(found))) if _FORMULA.search(found[n])), 0 if len(found) == 1 else None)
    return None if at is None else FinalAnswer(texts=(found[at],), marked=False, after="\n".join(found[at + 1 :]))


def _distinct(texts: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text.strip() for text in texts))
