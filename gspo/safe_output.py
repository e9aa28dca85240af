"""Text on its way to a terminal. In: text from anywhere. Out: text that shows what it is and holds no secret.

File names, field names, notes of rewards and the messages of libraries are written by others. Invariant: nothing that goes
through here can move a cursor, set a title, ring a bell or turn a line around.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from gspo.redact import known_secrets, redacted

_HIDING = (
    "\x7f-\x9f"  # delete, C1
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, line ends, invisible marks
    "\ud800-\udfff\U000e0000-\U000e0fff"  # bytes that are no text, invisible tags
)
_ACTING = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]|"  # a whole sequence, so that its last letter does not begin the next word
    f"[\x00-\x08\x0b-\x1f{_HIDING}]"  # of C0 tab and newline stay
)
_NOT_DRAWN = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f{_HIDING}]|\x1b\\](?!8;)")
"""What a library that draws with sequences of its own never writes."""


def visible(text: str) -> str:
    """Text of which every character that would act instead of being seen is replaced."""
    return _ACTING.sub("\N{REPLACEMENT CHARACTER}", text)


def printed(text: str) -> str:
    """Text as it may be printed: visible, without secrets."""
    return redacted(visible(text), known_secrets())


def line(text: str) -> str:
    """The same on one line."""
    return printed(text).replace("\n", " ").replace("\t", " ")


class SafeStream:
    """A text stream through which only `printed` text goes."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write what may be printed of a text."""
        self.stream.write(printed(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write texts one after the other."""
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Within it, all that this process prints is safe to look at."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SafeStream(before[0]), SafeStream(before[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class AnsiStream(SafeStream):
    """A text stream for a library that draws: its colours and moves go through, and nothing else that acts."""

    def write(self, text: str) -> int:
        """Write what may be drawn of a text."""
        self.stream.write(redacted(_NOT_DRAWN.sub("\N{REPLACEMENT CHARACTER}", text), known_secrets()))
        return len(text)


def terminal() -> TextIO:
    """Standard output for a library that draws on it. What others print meanwhile comes through that library too."""
    stream = sys.stdout.stream if isinstance(sys.stdout, SafeStream) else sys.stdout
    return cast(TextIO, AnsiStream(stream))
