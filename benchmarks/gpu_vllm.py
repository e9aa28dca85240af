"""vLLM on the workloads of `gpu_decode.py`, in a process of its own.

In: a folder with a `config.json`, workloads as JSON, GiB for the KV cache, and a line to begin. Out: one line of JSON
per workload: tokens and seconds of the fastest call, or of all calls for mixed lengths. Weights are random. Log-probs
of the sampled tokens are on, as RL needs them.

    PYTHONPATH=SITE python benchmarks/gpu_vllm.py FOLDER '[{"prompts": 32, "samples": 8, "new": 256, "stops": 0}]' 20
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

PROMPT = 64
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class Peer:
    """vLLM in a process of its own. Starting takes a minute or more, mostly of the host, so that several start at once;
    `speeds` lets one of them work. All hold their memory until then, so the KV cache has a fixed size."""

    def __init__(self, site: Path, config: Any, workloads: list[dict[str, int]], cache_gib: float) -> None:
        self.folder = TemporaryDirectory()
        config.save_pretrained(self.folder.name)
        self.workloads = workloads
        path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, self.folder.name, json.dumps(workloads), str(cache_gib)],
            env={**os.environ, **QUIET, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ready(self) -> str:
        """Wait until it has started; in how many seconds, or why it failed."""
        printed = []
        for line in self.process.stdout:  # type: ignore[union-attr]  # it is piped
            printed.append(line)
            if line.startswith("{"):
                return f"vLLM started in {json.loads(line)['start_s']:.0f} s"
        return "vLLM failed: " + "".join(printed)[-1500:]

    def speeds(self) -> list[dict[str, float]]:
        """Tokens and seconds of each workload; empty if it failed. Ends the process."""
        output, _ = self.process.communicate("go\n")
        self.folder.cleanup()
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        return lines if len(lines) == len(self.workloads) else []


def main() -> None:
    folder, workloads, cache_gib = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
    vocabulary = json.loads(Path(folder, "config.json").read_text())["vocab_size"]
    began = time.perf_counter()
    import torch
    from vllm import LLM, SamplingParams

    longest = PROMPT + max(work["new"] for work in workloads)
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest + 16,
        max_num_seqs=256,
        # Ignored but for a check, because the next line decides: profiling would count the memory of other processes.
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(cache_gib * 2**30),
        logprobs_mode="processed_logprobs",
    )
    print(json.dumps({"start_s": time.perf_counter() - began}), flush=True)
    sys.stdin.readline()
    for work in workloads:
        ids = torch.randint(vocabulary, (work["prompts"], PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        stops = list(range(0, vocabulary, work["stops"])) if work["stops"] else []
        took = []
        for repeat in range(1 + work.get("repeats", 2)):
            sampling = SamplingParams(
                n=work["samples"],
                temperature=1.0,
                max_tokens=work["new"] if repeat else 8,
                ignore_eos=True,
                stop_token_ids=stops,
                logprobs=0,
                detokenize=False,
                seed=None,
            )
            llm.reset_prefix_cache()
            start = time.perf_counter()
            outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
            tokens = sum(len(c.token_ids) for output in outputs for c in output.outputs)
            took.append((tokens, time.perf_counter() - start))
        del took[0]  # warms up
        # Of mixed lengths, all calls count: they differ in their longest completion.
        tokens, seconds = map(sum, zip(*took, strict=True)) if stops else max(took, key=lambda one: one[0] / one[1])
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
