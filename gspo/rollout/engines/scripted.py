"""Completions from a table, for tests and for trying rewards without a model.

In: prompts, and texts by prompt. Out: for each prompt its texts in turn, tokenized, with an end token. Invariant: a
completion depends only on the prompt and the sample index; seed and stream have no effect. With a model,
`logp_sampler` is that model's log-prob at the sampling temperature. Top-k and top-p are not applied, because they could
give a scripted token probability 0. Without a model, and for greedy decoding, `logp_sampler` is 0. A text with fewer
than `min_tokens` tokens is repeated, and the rest of a text follows the end of thinking that is inserted into it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gspo.errors import ConfigError
from gspo.model.micro_batch import padded
from gspo.rollout.engine import (
    Controls,
    EngineContext,
    EngineTraits,
    ExtendOptions,
    Extension,
    GenerateOptions,
    continued,
    controls_for,
    eval_mode,
)
from gspo.types import Completion, Prompt, Sampling, StopReason

TRAITS = EngineTraits(extends=True, accepts_quantized=True)


def build(
    context: EngineContext, *, completions: Mapping[str, Sequence[str]] | None = None, default: str = ""
) -> ScriptedEngine:
    """`completions`: texts by prompt id, or by the prompt's text in the data file; `default` is used for all others."""
    if not context.stop_ids:
        raise ConfigError(
            "rollout.engine: 'scripted' ends completions with a stop token, and the tokenizer has none; set eos_token "
            "in the tokenizer's config"
        )
    for name, texts in (completions or {}).items():
        if isinstance(texts, str) or not texts:
            raise ConfigError(f"rollout.engine_options.completions: {name!r} needs a list of at least one text")
    return ScriptedEngine(context, completions=completions or {}, default=default)


class ScriptedEngine:
    """Reads completions from a table."""

    about = ""
    decoded = None

    def __init__(self, context: EngineContext, *, completions: Mapping[str, Sequence[str]], default: str) -> None:
        self.context = context
        self.completions = completions
        self.default = default

    @property
    def reports_routes(self) -> bool:
        return False

    def generate(self, prompts: Sequence[Prompt], options: GenerateOptions) -> list[list[Completion]]:
        controls = controls_for(self.context, options.sampling)
        return [self._group(prompt, options.samples, controls, options.version) for prompt in prompts]

    def extend(self, extensions: Sequence[Extension], options: ExtendOptions) -> list[list[Completion]]:
        controls = controls_for(self.context, options.sampling)
        return [[self._extended(e, c, controls, options.version) for c in e.completions] for e in extensions]

    def _extended(self, extension: Extension, before: Completion, controls: Controls, version: int) -> Completion:
        if before.stop is not StopReason.CUT:
            return before
        ids, cut = self._script(self._text_of(extension.prompt, before.sample), controls)
        ids = ids[: len(before.token_ids) + extension.tokens]
        (end,) = controls.ends([ids], [cut])
        (logp,) = self._logp(extension.prompt, [ids[: end.length]], controls.sampling)
        (text,) = self.context.texts([ids[: end.length]])
        return continued(before, [(version, len(before.token_ids))], {"text": text, **controls.fields(ids, logp, end)})

    def sync(self, version: int) -> None:
        """Nothing to send: the log-probs are those of the learner's own model."""

    def end_conversations(self, conversations: Sequence[str]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""

    def _group(self, prompt: Prompt, samples: int, controls: Controls, version: int) -> list[Completion]:
        scripts = [self._script(self._text_of(prompt, sample), controls) for sample in range(samples)]
        ends = controls.ends([ids for ids, _ in scripts], [cut for _, cut in scripts])
        ids_G = [ids[: end.length] for (ids, _), end in zip(scripts, ends, strict=True)]
        text_G = self.context.texts(ids_G)
        logp_G = self._logp(prompt, ids_G, controls.sampling)
        if controls.sampling.greedy_last and ids_G:
            logp_G[-1] = (0.0,) * len(ids_G[-1])
        return [
            Completion(
                prompt_id=prompt.id,
                sample=sample,
                text=text_G[sample],
                version=version,
                **controls.fields(ids_G[sample], logp_G[sample], ends[sample]),
            )
            for sample in range(samples)
        ]

    def _text_of(self, prompt: Prompt, sample: int) -> str:
        texts = self.completions.get(prompt.id) or self.completions.get(_content(prompt)) or [self.default]
        return texts[sample % len(texts)]

    def _script(self, text: str, controls: Controls) -> tuple[tuple[int, ...], bool]:
        """The tokens of a text with an end token, up to the token limit, and whether its thinking was cut."""
        sampling = controls.sampling
        ids = tuple(self.context.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids and sampling.min_tokens:
            raise ConfigError(
                "rollout.engine_options.completions: an empty text cannot have rollout.min_tokens = "
                f"{sampling.min_tokens}; write a text, or set min_tokens = 0"
            )
        ids *= max(1, -(-sampling.min_tokens // max(1, len(ids))))
        ids = (*ids, self.context.stop_ids[0])
        budget = sampling.thinking_budget
        cut = bool(budget) and len(ids) > budget and controls.unclosed([ids])[0]
        if cut:
            ids = (*ids[:budget], *controls.forced_ids, *ids[budget:])
        return ids[: sampling.max_tokens], cut

    @torch.no_grad()
    def _logp(self, prompt: Prompt, ids_G: list[tuple[int, ...]], sampling: Sampling) -> list[tuple[float, ...]]:
        model = self.context.model
        if model is None or sampling.temperature == 0 or not ids_G:
            return [(0.0,) * len(ids) for ids in ids_G]
        ids_GT = padded([prompt.token_ids + ids for ids in ids_G], model.device)
        first = len(prompt.token_ids) - 1
        with eval_mode(model):
            logits_GTV = model(input_ids=ids_GT).logits[:, :-1].float() / sampling.temperature
        # As in `rollout.min_tokens`: there an end token has probability 0.
        logits_GTV[:, first : first + sampling.min_tokens, list(self.context.stop_ids)] = -torch.inf
        # Real log-probs, so that a run with scripted completions computes real ratios.
        logp_GT = logits_GTV.log_softmax(-1).gather(2, ids_GT[:, 1:, None]).squeeze(2)
        return [tuple(logp_GT[g, first : first + len(ids)].tolist()) for g, ids in enumerate(ids_G)]


def _content(prompt: Prompt) -> str:
    """The prompt's text; for a chat, the text of the last message."""
    return prompt.content if isinstance(prompt.content, str) else str(prompt.content[-1].get("content", ""))
