"""Tokenizer, padding, chat template and stop tokens: where a completion begins and what ends it.

In: the context. Out: findings, and the tokenizer of the run. Invariant: the tokenizer and the template are those of the
run.

The most common cause of completions that never end is a chat template that closes a turn with a token that is not among
the stop tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gspo.build import tokenizer_for
from gspo.config import ProblemsConfig
from gspo.data.chat import render, uses_template
from gspo.data.problems import with_instructions
from gspo.model.load import Policy
from gspo.preflight.context import PreflightContext
from gspo.preflight.data import excerpt
from gspo.preflight.findings import Finding, fail, note, ok, warning

CONTENT = "ANSWER"
"""Placeholder for the assistant's message."""


def check_tokenizer(context: PreflightContext) -> Iterator[Finding]:
    context.tokenizer = tokenizer = tokenizer_for(context.config)
    yield ok(f"{type(tokenizer).__name__} with {len(tokenizer)} tokens.", vocabulary=len(tokenizer))
    if tokenizer.pad_token_id is None:
        yield note(
            "The tokenizer has no padding token; an end token fills short rows, where no real token attends to it."
        )
    elif tokenizer.pad_token_id == tokenizer.eos_token_id:
        yield note(
            "Padding and end token are the same. That is harmless here: padding is identified by its position, so a "
            "completion's own end token is still trained on."
        )


# ------------------------------------------------------------------------------------------------- chat template


def check_template(context: PreflightContext) -> Iterator[Finding]:
    templated = False
    for name, data in context.config.data.sources.items():
        templated |= uses_template(context.tokenizer, chat=data.chat)
        yield _presentation(context, name, data)
    if templated:
        yield _generation_prompt(context.tokenizer)


def _presentation(context: PreflightContext, source: str, data: ProblemsConfig) -> Finding:
    """How the model sees the problems of a source."""
    tokenizer = context.tokenizer
    train = context.problems.train if context.problems else ()
    prompt = next((p for p in train if p.source == source), None)
    where = f"{source}: " if source else ""
    example = prompt.text if prompt else render(with_instructions("What is 1 + 1?", data), tokenizer, chat=data.chat)[0]
    if not uses_template(tokenizer, chat=data.chat):
        reason = "data.chat = no" if data.chat == "no" else "the tokenizer has no chat template"
        return note(
            f"{where}Prompts are given to the model as plain text ({reason}).",
            "A chat model needs its template; a base model needs a prompt that is to be continued.",
            detail=[f"example: {excerpt(example)}"],
            prompt=example,
        )
    return ok(
        f"{where}Prompts are wrapped in the tokenizer's chat template.",
        detail=[f"example: {excerpt(example)}"],
        prompt=example,
    )


def _generation_prompt(tokenizer: Any) -> Finding:
    """Whether a rendered prompt ends where the assistant's message begins."""
    cued = _rendered(tokenizer, cue=True)
    plain = _rendered(tokenizer, cue=False)
    header = _header(tokenizer, plain)
    if cued != plain:
        return ok(f"The template ends with the generation prompt {cued.removeprefix(plain)!r}.")
    if header is None:
        return note(
            "The template adds no generation prompt, and its rendering of an assistant's message does not show "
            "whether one is needed."
        )
    if not header.strip():
        return ok(
            "The template adds no generation prompt and needs none: the completion follows the user's turn directly."
        )
    return warning(
        f"The chat template ignores add_generation_prompt: the assistant's turn begins with {header!r}, but the "
        "prompt ends before it, so the model has to write it or continues the user's turn.",
        "Add {% if add_generation_prompt %}...{% endif %} to the tokenizer's chat_template, or set data.chat = no and "
        "write the prompt format in the data.",
        header=header,
    )


def _header(tokenizer: Any, plain: str) -> str | None:
    """The text between the user's turn and the assistant's message; `None` if unknown."""
    whole = _with_answer(tokenizer)
    if whole is None or not whole.startswith(plain) or CONTENT not in whole:
        return None
    return whole[len(plain) :].partition(CONTENT)[0]


def _rendered(tokenizer: Any, *, cue: bool) -> str:
    chat = [{"role": "user", "content": "QUESTION"}]
    return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=cue))


def _with_answer(tokenizer: Any) -> str | None:
    """A rendered chat that ends with an assistant's message; `None` if the template refuses it."""
    chat = [{"role": "user", "content": "QUESTION"}, {"role": "assistant", "content": CONTENT}]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except Exception:  # a template is a program that may raise anything
        return None


# ------------------------------------------------------------------------------------------------- ends


def check_ends(context: PreflightContext) -> Iterator[Finding]:
    tokenizer = context.tokenizer
    policy = context.policy or Policy(model=context.skeleton, tokenizer=tokenizer, device=torch.device("cpu"))
    stops = policy.stop_ids
    if not stops:
        yield fail(
            "Neither the model nor its tokenizer has an end token, so no completion could ever end.",
            "Set eos_token in the tokenizer's config.",
        )
        return
    named = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in stops)
    yield ok(f"A completion ends at {named}.", stop_ids=list(stops))
    if texts := context.config.rollout.stop:
        yield ok(f"It also ends with the stop string {' or '.join(map(repr, texts))}.", stop=list(texts))
    if any(uses_template(tokenizer, chat=source.chat) for source in context.config.data.sources.values()):
        yield _end_of_turn(tokenizer, stops)
    yield from _vocabulary(context)


def _end_of_turn(tokenizer: Any, stops: tuple[int, ...]) -> Finding:
    """Whether the token that closes the assistant's turn in the template is a stop token."""
    whole = _with_answer(tokenizer)
    if whole is None or CONTENT not in whole:
        return note("The rendering of the chat template does not show how it ends the assistant's turn.")
    tail = whole.rpartition(CONTENT)[2]
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"]
    # Some tokenizers add their end of turn as an ordinary token.
    special = [i for i in ids if i in tokenizer.all_special_ids or i in tokenizer.added_tokens_decoder]
    if not special:
        return note(
            f"The chat template does not close the assistant's turn with a special token ({tail!r} follows the "
            f"message); the model must have been trained to end it with {tokenizer.eos_token}."
        )
    token = tokenizer.convert_ids_to_tokens(special[0])
    if special[0] in stops:
        return ok(f"The chat template closes the assistant's turn with {token}, which is a stop token.")
    return warning(
        f"The chat template closes the assistant's turn with {token} ({special[0]}), which is not a stop token: "
        "completions will run to rollout.max_tokens.",
        f'Set "eos_token": "{token}" in tokenizer_config.json, or add {special[0]} to eos_token_id in '
        "generation_config.json.",
        end_of_turn=special[0],
    )


def _vocabulary(context: PreflightContext) -> Iterator[Finding]:
    """An id without an embedding would stop the run in the middle of a forward pass."""
    rows = context.skeleton.get_input_embeddings().num_embeddings
    problems = context.problems
    used = max((max(p.token_ids) for p in problems.everything), default=0) if problems else 0
    if used >= rows:
        yield fail(
            f"The data contains token id {used}, but the model's embedding has only {rows} rows.",
            "The tokenizer belongs to another model; use this model's own.",
        )
    elif len(context.tokenizer) > rows:
        yield warning(
            f"The tokenizer has {len(context.tokenizer)} tokens, but the model's embedding has only {rows} rows.",
            "Make sure that the tokenizer belongs to this model.",
        )
