"""vLLM on the workloads of `gpu_decode.py`, in a process of its own.

In: a folder with a `config.json`, and workloads as JSON. Out: one line of JSON per workload: tokens, and seconds of the
fastest call. Weights are random. Log-probs of the sampled tokens are on, as RL needs them.

    PYTHONPATH=SITE python benchmarks/gpu_vllm.py FOLDER '[{"prompts": 32, "samples": 8, "new": 256, "stops": 0}]'
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = 64
QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def peer_speeds(
    site: Path, config: Any, folder: Path, workloads: list[dict[str, int]]
) -> tuple[list[dict[str, float]], str]:
    """Tokens and seconds of each workload under vLLM, and in how many seconds it started or why it failed."""
    config.save_pretrained(folder)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, __file__, str(folder), json.dumps(workloads)],
        env={**os.environ, **QUIET, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) != len(workloads) + 1:
        return [], "vLLM failed: " + (done.stdout + done.stderr)[-1500:]
    return lines[1:], f"vLLM started in {lines[0]['start_s']:.0f} s"


def main() -> None:
    folder, workloads = sys.argv[1], json.loads(sys.argv[2])
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
        gpu_memory_utilization=0.85,
        logprobs_mode="processed_logprobs",
    )
    print(json.dumps({"start_s": time.perf_counter() - began}), flush=True)
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
        tokens, seconds = max(took[1:], key=lambda one: one[0] / one[1])
        print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
