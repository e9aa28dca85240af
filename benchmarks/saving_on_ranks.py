"""What the leader of several ranks holds while it saves a model: all weights, or those of one file at a time.

In: sizes of models. Out: for each of them and both ways, the peak of the leader's resident set above what it was
before, and the seconds; exit code 1 if the weights that are read back differ. Invariant: each measurement has new
processes, because an allocator keeps memory that was freed.

    python benchmarks/saving_on_ranks.py --layers 4 8 16 32 --file-mb 256
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from gspo import config as settings
from gspo.build import policy_for, tokenizer_for
from gspo.model import save
from gspo.model.sharding import shard
from gspo.ranks.start import join_ranks

WAYS = ("whole", "files")


def main() -> int:
    options = _arguments()
    if options.way:
        return measure(options)
    print("| weights in GB | way | leader's peak above before, GB | share of the weights | seconds | files |")
    print("|---|---|---|---|---|---|")
    different = False
    for layers in options.layers:
        digests = set()
        for way in WAYS:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            command += [str(options.ranks), __file__, "--way", way, "--layers", str(layers)]
            command += ["--hidden", str(options.hidden), "--file-mb", str(options.file_mb)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            line, digest = next(line for line in output.splitlines() if line.startswith("| ")).split(" # ")
            print(line, flush=True)
            digests.add(digest)
        different |= len(digests) > 1
    print("the weights that are read back " + ("DIFFER" if different else "are the same"))
    return int(different)


def measure(options: argparse.Namespace) -> int:
    """One save, on all ranks."""
    save.FILE_BYTES = int(options.file_mb * 1e6)
    torch.set_num_threads(1)
    with join_ranks(600.0) as ranks, tempfile.TemporaryDirectory() as folder:
        config = _config(options)
        policy = policy_for(config, tokenizer_for(config))
        model = policy.model
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        shard(model, ranks.count)
        if not ranks.leads:
            for command in ("gather_weights", "end"):
                assert command in ranks.receive().decode()
                if command != "end":
                    for _ in save.whole_weights(policy, ranks):
                        pass
            return 0
        before, started = _resident("VmRSS"), time.monotonic()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        if options.way == "files":
            save.save_model(policy, Path(folder), ranks)
        else:
            with save.gathered_weights(policy, ranks) as weights:
                whole = dict(weights)
            model.save_pretrained(folder, state_dict=whole)
        seconds, peak = time.monotonic() - started, _resident("VmHWM") - before
        files = list(Path(folder).glob("*.safetensors"))
        print(
            f"| {size / 1e9:.2f} | {options.way} | {peak / 1e9:.2f} | {peak / size:.2f} | {seconds:.1f} | "
            f"{len(files)} | # {_digest(Path(folder))}"
        )
    return 0


def _resident(field: str) -> int:
    """Bytes of the resident set: now (VmRSS), or its peak (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _digest(folder: Path) -> str:
    from transformers import AutoModelForCausalLM

    digest = hashlib.sha256()
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder).state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def _config(options: argparse.Namespace) -> Any:
    size = {"num_hidden_layers": options.layers[0], "hidden_size": options.hidden, "head_dim": options.hidden // 4}
    size["intermediate_size"] = 3 * options.hidden
    tree: dict[str, Any] = {
        "model": {"build": "tiny_dense", "build_options": size, "device": "cpu"},
        "data": {"task": "sorting", "held_out": 0},
        "eval": {"every": 0},
    }
    return settings.from_tree(tree, where="benchmark")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the two ways to save a sharded model.")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--file-mb", type=float, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
