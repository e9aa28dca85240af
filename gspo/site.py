"""Links to the documentation site.

In: a text that names pages of the documentation by their files, `docs/engines.md#installing-vllm`. Out: the same text
with their addresses. Invariant: messages in the code name files, which a test checks; whatever prints a message for the
user calls `linked`, because an installed package has no such files.
"""

from __future__ import annotations

import re

SITE = "https://gspo-rl.github.io/gspo/"
PAGE = re.compile(r"\bdocs/([a-z-]+)\.md(#[\w-]+)?")


def linked(text: str) -> str:
    """The text with the addresses of the pages that it names."""
    return PAGE.sub(lambda found: f"{SITE}{found[1]}/{found[2] or ''}", text)
