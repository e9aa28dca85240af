"""Strip formatting from text.

In: a completion, or one statement of it. Out: the same text without HTML, colors, fonts, arrows and end-of-sequence
tokens. Invariant: the meaning is preserved. Struck-out text is removed, and superscripts, subscripts and the words
`base 8` become LaTeX. Runtime is bounded for any input.
"""

from __future__ import annotations

import re

# End tokens of common tokenizers, which appear as text if they are not special tokens of this one.
_END = re.compile(r"(?:</s>|<eos>|\[EOS\]|<end_of_turn>|<[|｜][\w▁]{1,40}[|｜]>)$")
_INLINE = ("b", "strong", "i", "em", "u", "span", "code", "mark", "font")
_BLOCK = ("p", "div", "center", "pre", "li", "h1", "h2", "h3", "h4", "h5", "h6")
_BREAK = re.compile(r"(?i)<br\s?/?>")
# ~~72~~ is struck out, but ~72 means about 72.
_STRUCK = re.compile(r"(?i)<(del|s|strike)>[^<]*</\1>|(?<![^\s(*_\"])~~(?=\S)[^~\n]+(?<=\S)~~(?!\w)")
_RAISED = re.compile(r"(?i)<(su[bp])>([^<>]{1,40})</\1>")
_SUBSCRIPT = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|textsf|textnormal|emph|underline|mathrm|mathbf|mathit|mathsf|mathtt|bm|bold"
    r"|boldsymbol|pmb|mbox|hbox|(?:textcolor|colorbox|color)\s*\{[^{}]*\})\s*\{([^{}]*)\}"
)
# Fonts, sizes and colors do not change an answer.
_FONT = re.compile(
    r"\\(?:bf|bfseries|it|itshape|rm|sf|tt|mathbf|mathrm|mathit|tiny|small|normalsize|large|Large|LARGE|huge|Huge)"
    r"(?![A-Za-z{])|\\color\s*\{[^{}]*\}|\\\\\s*$"
)
_SO = r"\\(?:Rightarrow|Longrightarrow|implies|therefore)(?![A-Za-z])|(?<![<>=-])[=-]{1,2}>|[→⇒⟹⟶]"
_LEADING_ARROW = re.compile(rf"^((?:[\s$({{]|\\[(\[])*)(?:{_SO}|\\(?:to|(?:long)?rightarrow)(?![A-Za-z]))")
_ARROW_AFTER_WORD = re.compile(rf"([A-Za-z]{{2}}[*_]*)\s*(?:{_SO})(?=\s*[-+$€£0-9(])")
_ARROW_AFTER_NUMBER = re.compile(rf"([0-9)}}%])\s*(?:{_SO})(?=\s*[-+$€£0-9(])")
# "1011 in base 2", "72 (base 8)", "34 base five".
_IN_BASE = re.compile(
    r"(?i)(?<![0-9A-Za-z])([0-9][0-9a-f]*)\s?[(,]?\s?(?:in |written in )?base[ -]([0-9]{1,2}|[a-z]+)(?![0-9A-Za-z])\)?"
)
# A unit in parentheses at the end: 72 (clips).
_ASIDE = re.compile(
    r"(?:(?<=[0-9}%]) ?|(?<=[A-Za-z]) )(?:(?<= )[(\[]|[(\[](?= ))\s?([A-Za-z]{2,}(?:[ -][A-Za-z]{2,})*) ?[)\]]\s*$"
)


def without_markup(text: str) -> str:
    """A completion without HTML, struck-out text and end-of-sequence tokens."""
    text = text.rstrip()
    while end := _END.search(text[-60:]):
        if end[0] == "</s>" and re.search("<s>[^<]*</s>$", text[-200:]):
            break  # it closes struck-out text and is not an end-of-sequence token
        text = text[: len(text) - len(end[0])].rstrip()
    if "<" in text:
        text = _BREAK.sub("\n", _RAISED.sub(lambda m: f"{'^' if m[1].lower() == 'sup' else '_'}{{{m[2]}}}", text))
        for names, replacement in ((_INLINE, ""), (_BLOCK, "\n")):
            for name in names:
                if f"</{name}>" in text:  # without a closing tag, `<b` may be an inequality
                    text = re.sub(rf"</?{name}(?:\s[^<>]*)?>", replacement, text)
    return _STRUCK.sub(" ", text)


def without_style(text: str) -> str:
    """A statement without fonts, colors and arrows, with the words of `\\text{...}` as words."""
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPT) + "}", text)
    for _ in range(4):  # commands can be nested
        text = _WRAPPED.sub(r" \1 ", text)
    text = _LEADING_ARROW.sub(r"\1 ", _FONT.sub(" ", text))
    return _ARROW_AFTER_NUMBER.sub(r"\1 = ", _ARROW_AFTER_WORD.sub(r"\1 ", text))


def without_asides(text: str) -> str:
    """A plain statement with `72 base 8` rewritten to `72_{8}` and `72 (clips)` to `72 clips`."""
    return _ASIDE.sub(r" \1", _IN_BASE.sub(r"\1_{\2}", text))
