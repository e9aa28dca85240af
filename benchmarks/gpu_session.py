"""A session on a GPU machine on which nothing can be installed: the packages to carry there, and what to measure.

    python benchmarks/gpu_session.py pack                                   # here; writes .carry/
    python benchmarks/gpu_session.py list                                   # the parts, with their limits
    python benchmarks/gpu_session.py run learn8b live-rows --out DIR        # there, next to .carry/

In: parts by name. Out: DIR/NAME.log of each part and, as soon as it has ended, a line of DIR/session.jsonl with its
exit code and time. Invariant: every part is a process of its own with a limit below nine minutes. One that fails or
hangs does not stop the others, and one that the remaining time has no room for is not started.

The machine has torch, transformers, numpy and rich, under Python 3.12. `pack` writes the packages that it lacks, and
says how much travels with the working tree. A model file is carried in pieces, by calls before: `--model` is where they
were put together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRIED = Path(".carry")
ARCHIVE = "packages.tar.xz"
PACKAGES = (
    *("orjson", "datasets", "dill", "multiprocess", "xxhash"),
    *("math-verify", "latex2sympy2-extended", "antlr4-python3-runtime"),
    *("starlette", "uvicorn", "anyio", "sniffio", "h11", "click"),
    *("hypothesis", "sortedcontainers", "pytest", "pytest-timeout", "pluggy", "iniconfig"),
    *("peft", "gguf"),
)
"""Not their dependencies: those are on the machine, and others must not replace them."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_BYTES = 64 * 2**20
"""What may travel: the working tree and what is carried."""
MOST_S = 540
"""The longest call."""
NOT_RUN = -1
"""Exit code of a part that was not started."""
TIMED_OUT = 124


@dataclass(frozen=True, kw_only=True)
class Part:
    """One measurement."""

    about: str
    words: tuple[str, ...]
    """Arguments of Python."""
    limit_s: int
    needs: tuple[str, ...] = field(default=())
    """Options of `run` that it cannot do without."""

    def command(self, options: argparse.Namespace) -> list[str]:
        """With the places of this machine."""
        # Not `str.format`: a word may contain braces.
        places = {"{model}": str(options.model), "{vllm}": str(options.vllm)}
        return [sys.executable, *(places.get(word, word) for word in self.words)]


def bench(name: str, *words: str, limit_s: int, about: str, needs: tuple[str, ...] = ()) -> Part:
    """A script of this folder."""
    return Part(about=about, words=(f"benchmarks/{name}.py", *words), limit_s=limit_s, needs=needs)


def trained(seed: int) -> Part:
    """SmolLM2 in float32, to the end of the budget that the 16-bit runs had."""
    return Part(
        about=f"float32 SmolLM2-135M to 400,000 tokens, seed {seed}",
        words=(
            *("-m", "gspo", "train", "recipes/smollm2-arithmetic.toml", "--tokens=400000", f"--seed={seed}"),
            *("--model.dtype=float32", "--model.compile=off", "--eval.every=6", "--model.path", "{model}"),
            f"--run-dir={Path(tempfile.gettempdir()) / f'gspo-float32-{seed}'}",
        ),
        limit_s=520,
        needs=("model",),
    )


USES_CUDA = re.compile(r"\bCUDA\b|cuda\.is_available|import .*\bDEVICE\b")
CUDA_TESTS = ("-m", "pytest", "-q", "--maxfail=50", "-m", "not slow", "-p", "no:cacheprovider")

PARTS = {
    "tests": Part(about="the fast tests in files that use CUDA", words=CUDA_TESTS, limit_s=500),
    "learn": bench("gpu", "learn", "--repeats", "3", limit_s=300, about="MFU of 0.6B, all weights"),
    "learn8b": bench("gpu", "learn8b", "--repeats", "3", limit_s=200, about="MFU of 8B with LoRA (target 45 %)"),
    "learn30b": bench("gpu", "learn30b", "--repeats", "3", limit_s=400, about="MFU of 30B-A3B (target 35 %)"),
    "step": bench("gpu", "step", "--repeats", "3", limit_s=200, about="the 0.6B step (target 2.0 s)"),
    "decode": bench("gpu", "decode", "--repeats", "2", limit_s=300, about="decoding of 0.6B"),
    "large": bench("gpu", "large", "--repeats", "2", limit_s=480, about="decoding of 8B and 30B-A3B, and with LoRA"),
    "large-vllm": bench(
        *("gpu", "large", "--repeats", "2", "--vllm", "{vllm}"),
        limit_s=530,
        about="the same, next to vLLM",
        needs=("vllm",),
    ),
    "live-rows": bench("live_rows_gpu", limit_s=240, about="8B, a decoding step with 8 to 256 live rows; captures"),
    "live-rows-0.6b": bench("live_rows_gpu", "--shape", "0.6b", limit_s=180, about="the same of 0.6B"),
    "plan": bench("plan_gpu", "--seconds", "450", limit_s=520, about="whole steps of 8 models, for `gspo plan`"),
    "memory-same": bench("memory_gpu", "same", limit_s=150, about="optimizer offload gives the same weights"),
    "memory-8b": bench("memory_gpu", "full-default", "full-offload", limit_s=400, about="all weights of an 8B model"),
    "memory-resume": bench("memory_gpu", "resume-offload", limit_s=300, about="offload, saved and continued bitwise"),
    "memory-long": bench("memory_gpu", "long-0.6b", "long-8b", limit_s=420, about="completions of 2k to 32k tokens"),
    "rounding": bench(
        *("rounding", "recipes/smollm2-arithmetic.toml", "--rollout.prompts=8", "--model.path", "{model}"),
        limit_s=300,
        about="rounding in three precisions, of Qwen2.5-Coder-1.5B or another model",
        needs=("model",),
    ),
    **{f"float32-{seed}": trained(seed) for seed in range(3)},
}


# ---- here


def pack() -> int:
    """Write the packages for the other machine."""
    folder = ROOT / CARRIED
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as site:
        platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site]
        command += ["--python-version", "3.12", "--only-binary=:all:", *platforms]
        command += ["--constraint", str(ROOT / "constraints.txt"), *PACKAGES]
        subprocess.run(command, check=True)
        with tarfile.open(folder / ARCHIVE, "w:xz") as archive:
            for file in sorted(Path(site).iterdir()):
                if file.name != "bin":
                    archive.add(file, file.name, filter=without_bytecode)
    tree, carried = bytes_of_tree(ROOT), bytes_of(folder)
    print(f"{folder / ARCHIVE}: {bytes_of(folder / ARCHIVE) / 2**20:.1f} MiB")
    print(f"travels: working tree {tree / 2**20:.1f} MiB, {CARRIED} {carried / 2**20:.1f} MiB")
    if tree + carried > MOST_BYTES:
        print(f"more than {MOST_BYTES / 2**20:.0f} MiB: nothing could be sent; carry less")
        return 1
    return 0


def without_bytecode(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in file.name else file


def bytes_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def bytes_of_tree(root: Path) -> int:
    """Bytes of the files that travel: tracked, and untracked ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    files = {root / name for name in names if name}
    return sum(file.stat().st_size for file in files if file.is_file())


def show() -> int:
    for name, part in PARTS.items():
        needs = "".join(f" --{option}" for option in part.needs)
        print(f"{name:<15} {part.limit_s:>4} s  {part.about}{f' (needs{needs})' if needs else ''}")
    return 0


# ---- there


def run(options: argparse.Namespace) -> int:
    """Run parts one after the other. The exit code is 1 if one failed or was not run."""
    options.out.mkdir(parents=True, exist_ok=True)
    environment = environment_of(packages(ROOT / CARRIED / ARCHIVE))
    deadline = time.monotonic() + options.seconds
    codes = []
    for name in options.parts:
        part = PARTS[name]
        words = part.command(options) + (cuda_tests() if part.words == CUDA_TESTS else [])
        left = deadline - time.monotonic()
        limit_s = min(part.limit_s, left) if options.squeeze else part.limit_s
        started = time.monotonic()
        print(f"{name}: $ {shlex.join(words)}", flush=True)
        code = NOT_RUN
        if limit_s <= left:
            code = limited(words, limit_s, options.out / f"{name}.log", environment)
        codes.append(code)
        record = {
            "part": name,
            "words": words[1:],
            "code": code,
            "seconds": round(time.monotonic() - started, 1),
            "limit_s": round(limit_s, 1),
        }
        # After each part, because a call that ends early still brings back what is there.
        with (options.out / "session.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{name}: {outcome(code)} after {record['seconds']} s", flush=True)
        print(tail(options.out / f"{name}.log"), flush=True)
    return int(any(codes))


def outcome(code: int) -> str:
    return {0: "done", NOT_RUN: "not run, because too little time is left", TIMED_OUT: "over its limit"}.get(
        code, f"failed with exit code {code}"
    )


def tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.is_file() else ""


def limited(words: Sequence[str], limit_s: float, log: Path, environment: dict[str, str]) -> int:
    """The exit code of a command whose output goes to a file. What it has started ends with it."""
    with log.open("w") as file:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return TIMED_OUT


def packages(archive: Path) -> Path | None:
    """The folder with the carried packages; None if there are none. Unpacked once per machine."""
    if not archive.is_file():
        return None
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    site = Path(tempfile.gettempdir()) / f"gspo-packages-{digest}"
    if not site.is_dir():
        partial = Path(tempfile.mkdtemp(prefix="gspo-packages-"))
        with tarfile.open(archive) as opened:
            opened.extractall(partial, filter="data")
        partial.rename(site)
    return site


def environment_of(site: Path | None) -> dict[str, str]:
    path = [str(ROOT), *([] if site is None else [str(site)]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def cuda_tests() -> list[str]:
    """The test files that use a GPU where there is one."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if USES_CUDA.search(file.read_text())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("pack", help="write the packages for the other machine")
    commands.add_parser("list", help="show the parts")
    sub = commands.add_parser("run", help="run parts, on the other machine")
    sub.add_argument("parts", nargs="+", choices=PARTS, metavar="PART")
    sub.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-session")))
    sub.add_argument("--seconds", type=float, default=MOST_S, help="end after this time (default: %(default)s)")
    sub.add_argument("--squeeze", action="store_true", help="start a part also if less time is left than its limit")
    sub.add_argument("--model", type=Path, help="a model directory or GGUF file")
    sub.add_argument("--vllm", type=Path, help="the folder that shared/tools/pack-vllm-gpu was unpacked in")
    options = parser.parse_args(arguments)
    if options.what == "pack":
        return pack()
    if options.what == "list":
        return show()
    for name in options.parts:
        for option in PARTS[name].needs:
            if getattr(options, option) is None:
                parser.error(f"{name} needs --{option}")
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
