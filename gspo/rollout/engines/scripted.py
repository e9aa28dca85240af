"""Completions from a table, for tests and for trying rewards without a model.

In: prompts, and texts by prompt. Out: for each prompt its texts in turn, tokenized, with an end token. Invariant: a
completion depends only on the prompt and the sample index; seed and stream have no effect. With a model,
`logp_sampler` is that model's log-prob at the sampling temperature. Top-k and top-p are not applied, because they could
give a scripted token probability 0. Without a model, and for greedy decoding, `logp_sampler` is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gspo.errors import ConfigError
from gspo.model.micro_batch import padded
from gspo.rollout.engine import EngineContext, EngineTraits, eval_mode
from gspo.types import Completion, Prompt, Sampling, StopReason

TRAITS = EngineTraits(accepts_quantized=True)


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

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        seed: int,
        stream: str,
        version: int,
        routes: bool = False,
    ) -> list[list[Completion]]:
        return [self._group(prompt, samples, sampling, version) for prompt in prompts]

    def sync(self, version: int) -> None:
        """Nothing to send: the log-probs are those of the learner's own model."""

    def close(self) -> None:
        """Nothing is held."""

    def _group(self, prompt: Prompt, samples: int, sampling: Sampling, version: int) -> list[Completion]:
        texts = self.completions.get(prompt.id) or self.completions.get(_content(prompt)) or [self.default]
        ids_G = [self._token_ids(texts[sample % len(texts)]) for sample in range(samples)]
        cut_G = [ids[: sampling.max_tokens] for ids in ids_G]
        text_G = self.context.texts(cut_G)
        logp_G = self._logp(prompt, cut_G, sampling.temperature)
        if sampling.greedy_last and cut_G:
            logp_G[-1] = (0.0,) * len(cut_G[-1])
        return [
            Completion(
                prompt_id=prompt.id,
                sample=sample,
                token_ids=cut_G[sample],
                text=text_G[sample],
                logp_sampler=logp_G[sample],
                stop=StopReason.EOS if cut_G[sample] == ids_G[sample] else StopReason.LENGTH,
                version=version,
            )
            for sample in range(samples)
        ]

    def _token_ids(self, text: str) -> tuple[int, ...]:
        return (*self.context.tokenizer(text, add_special_tokens=False)["input_ids"], self.context.stop_ids[0])

    @torch.no_grad()
    def _logp(self, prompt: Prompt, ids_G: list[tuple[int, ...]], temperature: float) -> list[tuple[float, ...]]:
        model = self.context.model
        if model is None or temperature == 0 or not ids_G:
            return [(0.0,) * len(ids) for ids in ids_G]
        ids_GT = padded([prompt.token_ids + ids for ids in ids_G], model.device)
        with eval_mode(model):
            # Real log-probs, so that a run with scripted completions computes real ratios.
            logp_GTV = (model(input_ids=ids_GT).logits[:, :-1].float() / temperature).log_softmax(-1)
        logp_GT = logp_GTV.gather(2, ids_GT[:, 1:, None]).squeeze(2)
        first = len(prompt.token_ids) - 1
        return [tuple(logp_GT[g, first : first + len(ids)].tolist()) for g, ids in enumerate(ids_G)]


def _content(prompt: Prompt) -> str:
    """The prompt's text; for a chat, the text of the last message."""
    return prompt.content if isinstance(prompt.content, str) else str(prompt.content[-1].get("content", ""))
