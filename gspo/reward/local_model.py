"""A Hugging Face model in the worker of a reward: a causal model that judges, or a classifier that scores.

In: a directory or hub name. Out: the replies of the judge, or the logits of the classifier. Invariant: no code from the
model's repository runs unless asked. Greedy decoding, no dropout. Completions are batched in the order in which they
come, and weights are aligned in memory as the trainer's are, so on a CPU a resumed run gets the same numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo.config import ModelConfig
from gspo.errors import ConfigError
from gspo.model.load import position_limit
from gspo.model.memory_alignment import align
from gspo.model.source import resolve_model_source

WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a judge wrote."""

    text: str
    truncated: bool
    """Whether it reached the limit on its length."""


class _LocalModel:
    """A loaded model with its tokenizer."""

    def __init__(self, kind: str, path: str, *, where: str, dtype: str, device: str, trust_remote_code: bool) -> None:
        import transformers

        auto = getattr(transformers, kind)
        try:
            place, options = resolve_model_source(ModelConfig(path=path))
            trust = {"trust_remote_code": trust_remote_code, **options}
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(place, **trust)
            loaded = dtype if dtype == "auto" else getattr(torch, dtype)
            # Only safetensors: other formats are pickles, which run code.
            model = auto.from_pretrained(place, dtype=loaded, use_safetensors=not options, **trust)
            self.device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
            model.to(self.device)
        except Exception as error:  # transformers raises any kind of exception for a damaged model
            reason = str(error).removeprefix("model.path: ").strip().splitlines() or [type(error).__name__]
            raise ConfigError(f"{where}.path: cannot load {path!r}: {reason[0]:.300}; correct path or device") from None
        align(model)
        self.model = model.eval().requires_grad_(False)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.convert_ids_to_tokens(0)
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self.limit: int | None = position_limit(self.model)
        self.control = frozenset(map(str, (*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab())))
        """Token texts that must not appear in a completion, because the tokenizer would read them as control tokens."""

    @property
    def bytes(self) -> int:
        """Memory of the weights."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _padded(self, ids: Sequence[Sequence[int]], side: str) -> dict[str, Any]:
        longest = max(map(len, ids))
        pad = self.tokenizer.pad_token_id
        before = [(longest - len(row)) * (side == "left") for row in ids]
        after = [(longest - len(row)) * (side == "right") for row in ids]
        padded = [[pad] * b + list(row) + [pad] * a for b, row, a in zip(before, ids, after, strict=True)]
        mask = [[0] * b + [1] * len(row) + [0] * a for b, row, a in zip(before, ids, after, strict=True)]
        return {
            "input_ids": torch.tensor(padded, device=self.device),
            "attention_mask": torch.tensor(mask, device=self.device),
        }


class LocalJudge(_LocalModel):
    """A causal model that replies to chats."""

    def __init__(self, path: str, *, max_tokens: int, **options: Any) -> None:
        super().__init__("AutoModelForCausalLM", path, **options)
        self._max_tokens = max_tokens
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        ends = configured if isinstance(configured, list | tuple) else [configured]
        self._ends = sorted({i for i in (*ends, self.tokenizer.eos_token_id) if i is not None})

    def ids(self, chat: Sequence[dict[str, str]]) -> list[int]:
        """The tokens of a chat; without a chat template, of its texts."""
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(list(chat), tokenize=False, add_generation_prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        text = "\n\n".join(message["content"] for message in chat) + "\n\n"
        return list(self.tokenizer(text)["input_ids"])

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether the model's positions suffice for a question and its reply."""
        return self.limit is None or len(ids) + self._max_tokens <= self.limit

    def replies(self, questions: Sequence[Sequence[int]], *, until: float) -> list[Reply]:
        """Greedy replies to a batch. Raises `TimeoutError` after `until` (monotonic)."""
        from transformers import GenerationConfig

        batch = self._padded(questions, "left")
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=self._max_tokens,
            max_time=max(0.01, until - time.monotonic()),
            eos_token_id=self._ends or None,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        with torch.inference_mode():
            output = self.model.generate(**batch, generation_config=settings)
        if time.monotonic() >= until:
            raise TimeoutError("the judge took too long; raise reward.timeout_s, or lower max_tokens or concurrency")
        replies = []
        for row in output[:, batch["input_ids"].shape[1] :].tolist():
            end = next((i for i, token in enumerate(row) if token in self._ends), None)
            text = self.tokenizer.decode(row[:end], skip_special_tokens=True)
            replies.append(Reply(text=str(text), truncated=end is None))
        return replies


class LocalClassifier(_LocalModel):
    """A model with a classification head that scores chats."""

    def __init__(self, path: str, *, max_length: int, **options: Any) -> None:
        super().__init__("AutoModelForSequenceClassification", path, **options)
        self.labels: int = self.model.config.num_labels
        self._longest = min(filter(None, (max_length, self.limit)), default=None)

    def ids(self, prompt: Any, completion: str) -> tuple[list[int], bool]:
        """The tokens of a prompt with its completion, and whether they had to be truncated."""
        if self.tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            chat.append({"role": "assistant", "content": completion})
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            texts = prompt if isinstance(prompt, str) else "\n\n".join(str(m.get("content")) for m in prompt)
            # As a pair: a model with separators between the two gets them.
            ids = self.tokenizer(texts, completion)["input_ids"]
        return list(ids[: self._longest]), self._longest is not None and len(ids) > self._longest

    def logits(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """The logits of a batch, in float32."""
        # An empty text has no tokens, and the head needs one.
        rows = [row or [self.tokenizer.pad_token_id] for row in rows]
        with torch.inference_mode():
            result: list[list[float]] = self.model(**self._padded(rows, "right")).logits.float().tolist()
        return result


def identity(path: str) -> list[Any]:
    """What tells a model's weights from others without reading them: where they are, their sizes and times."""
    folder = Path(os.path.expanduser(path))
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)) if folder.is_dir() else []
    found = [(file.name, file.stat()) for file in files]
    return [str(folder.resolve()) if files else path, [[n, s.st_size, s.st_mtime_ns] for n, s in found]]
