"""What ranks hold of the weights while they sample, and what it costs: whole weights, or one layer at a time.

In: the sizes of a model. Out: for both values of `ranks.sampling_weights`, the seconds of a call of the engine and the
bytes of weights that a rank holds at most, printed by rank 0; exit code 1 if their completions differ. The calls take
turns, so that a change of the machine's speed affects both.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/sampling_weights.py
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from gspo import config as settings
from gspo.build import engine_for, policy_for, tokenizer_for
from gspo.model.partial import decoder_layers
from gspo.model.sharding import gathered, is_sharded, local, shard
from gspo.ranks.start import check_device, join_ranks
from gspo.rollout.engine import GenerateOptions
from gspo.rollout.lockstep import Lockstep
from gspo.types import Prompt, Sampling

MODES = ("whole", "layers")


def main() -> int:
    options = _arguments()
    config = _config(options)
    torch.set_num_threads(1)
    with join_ranks(600.0) as ranks:
        if not ranks.several:
            print("start it with torchrun: torchrun --nproc-per-node 2 benchmarks/sampling_weights.py")
            return 2
        policy = policy_for(config, tokenizer_for(config))
        check_device(policy.device, ranks)
        engine = engine_for(config, policy)
        layers = decoder_layers(policy.model)
        shard(policy.model, ranks.count)
        held = Held(policy.model, layers, ranks.count)
        ids = [tuple(5 + (i * i + j) % 8 for j in range(16)) for i in range(options.prompts)]
        prompts = [Prompt(id=str(i), content="", text="", token_ids=prompt) for i, prompt in enumerate(ids)]
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        peaks, completions = dict.fromkeys(MODES, 0), {}
        for repeat in range(options.repeats + 1):  # the first one warms up
            for mode in MODES:
                ranks.sum(torch.zeros(1))
                started, held.peak = time.monotonic(), 0
                with ExitStack() as stack:
                    stack.enter_context(gathered(policy.model) if mode == "whole" else Lockstep(policy.model, ranks))
                    found = engine.generate(
                        prompts[ranks.rank :: ranks.count],
                        GenerateOptions(
                            samples=options.group_size,
                            sampling=Sampling(max_tokens=options.tokens),
                            seed=0,
                            stream=f"train/{repeat}",
                            version=0,
                        ),
                    )
                # Until the last rank is done.
                spent = ranks.max(torch.tensor([time.monotonic() - started], dtype=torch.float64))
                if repeat:
                    seconds[mode].append(float(spent))
                peaks[mode] = max(peaks[mode], held.peak)
                completions[mode] = [completion.token_ids for group in found for completion in group]
        different = int(ranks.max(torch.tensor(int(completions["whole"] != completions["layers"]))))
        if ranks.leads:
            report(seconds, peaks, held.everything, ranks.count, different)
        else:
            ranks.receive()  # the command to end
        return different


class Held:
    """The most bytes of weights that this rank has held after the forward of a layer."""

    def __init__(self, model: Any, layers: list[Any], count: int) -> None:
        self.peak = 0
        self.everything = sum(p.numel() * p.element_size() for p in model.parameters())
        self._model = model
        self._count = count
        for layer in layers:
            layer.mlp.register_forward_hook(self._measure)  # inside of the layer, while it is whole

    def _measure(self, *forward: Any) -> None:
        # A gathered weight exists in addition to the shard of it.
        held = sum(
            local(p.detach()).nbytes + (0 if is_sharded(p) else p.nbytes // self._count)
            for p in self._model.parameters()
        )
        self.peak = max(self.peak, held)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the two ways to hold weights while ranks sample.")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def _config(options: argparse.Namespace) -> Any:
    size = {"num_hidden_layers": options.layers, "hidden_size": options.hidden, "intermediate_size": 3 * options.hidden}
    tree: dict[str, Any] = {
        "model": {"build": "tiny_dense", "build_options": size | {"head_dim": options.hidden // 4}, "device": "cpu"},
        "data": {"task": "sorting", "held_out": 0},
        "eval": {"every": 0},
    }
    return settings.from_tree(tree, where="benchmark")


def report(seconds: dict[str, list[float]], peaks: dict[str, int], everything: int, count: int, different: int) -> None:
    """Print both, and their ratios."""
    print(f"{count} ranks, {everything / 1e6:.1f} MB of weights; completions {'DIFFER' if different else 'are equal'}")
    for mode in MODES:
        median = statistics.median(seconds[mode])
        print(
            f"{mode:7} {median:.3g} s ({min(seconds[mode]):.3g} to {max(seconds[mode]):.3g}), at most "
            f"{peaks[mode] / 1e6:.1f} MB of weights per rank, {peaks[mode] / everything:.2f} of all"
        )
    ratio = statistics.median(layers / whole for whole, layers in zip(*seconds.values(), strict=True))
    print(f"layers / whole: time {ratio:.2f}, weights {peaks['layers'] / peaks['whole']:.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
