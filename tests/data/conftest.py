"""Fixtures of the data tests: tokenizers with one token per character, with and without a chat template."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_tokenizer(*, template: str | None = None, bos: bool = False, eos: bool = False) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<bos>", "<eos>", *string.printable]
    inner = Tokenizer(models.WordLevel({c: i for i, c in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if bos or eos:
        single = f"{'<bos> ' if bos else ''}$A{' <eos>' if eos else ''}"
        inner.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return char_tokenizer


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    return char_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return char_tokenizer(template=TEMPLATE)
