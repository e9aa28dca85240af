"""The sampling process: builds the run's model and engine, loads the weights it is told to, and samples from them.

    python -m gspo.collection.sampler FOLDER     started by `rollout/sampling_process.py`; FOLDER holds the weights

In: one JSON object per line on standard input. Out: one per line on standard output; what anything prints goes to
standard error. Invariant: it decides nothing and writes nothing. It ends when its input ends, in the middle of a call
too, and deletes FOLDER if the trainer did not.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import threading
import tomllib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

    from gspo.model.load import Policy
    from gspo.rollout.engine import Engine


class Sampler:
    """The model and the engine of this process."""

    policy: Policy
    engine: Engine

    def __init__(self) -> None:
        self._weights = ""

    def build(self, config: str, checkpoint: str) -> dict[str, Any]:
        """Load the model, from a checkpoint if one is given, and build the engine."""
        from dataclasses import replace

        from gspo.build import engine_for, policy_for, run_tokenizer, saved_model
        from gspo.config import from_tree

        settings = from_tree(tomllib.loads(config), where="the trainer's settings")
        begin = Path(checkpoint) if checkpoint else None
        tokenizer = run_tokenizer(settings, begin)
        model = settings.model if begin is None else saved_model(settings.model, begin)
        device = settings.rollout.sampler_device or model.device
        # There is no backward pass here.
        model = replace(model, device=device, gradient_checkpointing=False, compile="off")
        self.policy = policy_for(settings, tokenizer, model)
        self.engine = engine_for(settings, self.policy)
        return {"reports_routes": self.engine.reports_routes}

    def load(self, name: str, path: str) -> dict[str, Any]:
        """Replace the trained weights by those in a file."""
        import torch
        from safetensors.torch import load_file

        from gspo.errors import WeightSyncError
        from gspo.model.save import whole_weights
        from gspo.ranks.group import ONE

        tensors, own = load_file(path), dict(whole_weights(self.policy, ONE))
        if tensors.keys() != own.keys():
            raise WeightSyncError(f"{path}: weights that only one side has: {sorted(tensors.keys() ^ own.keys())[:3]}")
        with torch.no_grad():
            for key, weight in own.items():
                weight.copy_(tensors[key])  # in place: the engine may have captured the tensors
        self._weights = name
        return {"loaded": name}

    def generate(self, prompts: list[Any], options: dict[str, Any]) -> Any:
        """Sample completions from the weights that were loaded last."""
        from gspo.ranks.codec import convert
        from gspo.rollout.engine import GenerateOptions
        from gspo.types import Prompt

        return self._sample(self.engine.generate, convert(list[Prompt], prompts), convert(GenerateOptions, options))

    def extend(self, extensions: list[Any], options: dict[str, Any]) -> Any:
        """Continue completions with the weights that were loaded last."""
        from gspo.ranks.codec import convert
        from gspo.rollout.engine import ExtendOptions, Extension

        engine: Any = self.engine  # an `ExtendingEngine`, or the trainer would not ask
        return self._sample(engine.extend, convert(list[Extension], extensions), convert(ExtendOptions, options))

    def end_conversations(self, conversations: list[str]) -> dict[str, Any]:
        """Free what the engine keeps of conversations."""
        self.engine.end_conversations(conversations)
        return {"ended": len(conversations)}

    def _sample(self, call: Callable[[Any, Any], Any], requests: Any, options: Any) -> Any:
        from gspo.rollout.engine import DecodeStats
        from gspo.rollout.sampling_process import Sampled

        before = self.engine.decoded or DecodeStats()
        completions = call(requests, options)
        spent = (self.engine.decoded or DecodeStats()) - before
        return Sampled(
            weights=self._weights,
            completions=tuple(map(tuple, completions)),
            decoded=spent,
        )


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides when sampling stops
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing that a library prints may pass for an answer
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, commands, folder), daemon=True).start()
    serve(Sampler(), commands, answers)


def serve(sampler: Sampler, commands: queue.SimpleQueue[bytes], answers: BinaryIO) -> None:
    """Answer every command, until one fails."""
    from gspo.ranks.codec import encode

    while True:
        message = orjson.loads(commands.get())
        command = getattr(sampler, message.pop("command"))
        try:
            answer = command(**message)
        except Exception as error:
            # The trainer saves a checkpoint and ends the run, and this process with it.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(encode(answer) + b"\n")
        answers.flush()


def _read(commands: BinaryIO, received: queue.SimpleQueue[bytes], folder: str) -> None:
    """Pass on commands. When the trainer has ended, end this process at once, whatever it is doing."""
    for line in commands:
        received.put(line)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
