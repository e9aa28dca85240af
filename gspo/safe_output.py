"""Sanitize text before it reaches a terminal.

In: untrusted text, such as file names, field names, reward notes and library messages. Out: printable text without
secrets. Invariant: sanitized text cannot move the cursor, set the title, ring the bell or reverse the text direction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from gspo.redact import known_secrets, redacted

_INVISIBLE = (
    "\x7f-\x9f"  # delete, C1 controls
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, line ends, invisible marks
    "\ud800-\udfff\U000e0000-\U000e0fff"  # lone surrogates (undecodable bytes), invisible tags
)
_CONTROL = re.compile(
    # A CSI sequence is matched as a whole. Otherwise its final letter would stay and prefix the next word.
    "(?:\x1b\\[|\x9b)[0-?]{0,64}[ -/]{0,8}[@-~]|"
    f"[\x00-\x08\x0b-\x1f{_INVISIBLE}]"  # of the C0 controls, only tab and newline are kept
)
_UNSAFE_FOR_DISPLAY = re.compile(f"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f{_INVISIBLE}]|\x1b\\](?!8;)")
"""Controls that a display library such as Rich never writes. Its own colors, cursor moves and hyperlinks are kept."""


def visible(text: str) -> str:
    """Text with every control and invisible character replaced."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def printed(text: str) -> str:
    """Text that is safe to print: visible and without secrets."""
    return redacted(visible(text), known_secrets())


def line(text: str) -> str:
    """Text that is safe to print, on one line."""
    return printed(text).replace("\n", " ").replace("\t", " ")


class SafeStream:
    """A text stream that passes everything through `printed`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write a sanitized text. Returns the length of the original, as callers expect."""
        self.stream.write(printed(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several sanitized texts."""
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """Within this context, everything that this process prints is sanitized."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SafeStream(before[0]), SafeStream(before[1])  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class AnsiStream(SafeStream):
    """A text stream for a display library. Keeps its colors and cursor moves and replaces all other controls."""

    def write(self, text: str) -> int:
        """Write a text with ANSI styling kept and everything else sanitized."""
        self.stream.write(redacted(_UNSAFE_FOR_DISPLAY.sub("\N{REPLACEMENT CHARACTER}", text), known_secrets()))
        return len(text)


def terminal(stream: TextIO | None = None) -> TextIO:
    """A stream, by default standard output, for a display library. While it is active, other output is printed through
    that library too."""
    stream = sys.stdout if stream is None else stream
    # `SafeStream` would strip the library's own escape sequences, so unwrap it first.
    return cast(TextIO, AnsiStream(stream.stream if isinstance(stream, SafeStream) else stream))
