"""Torch uses the requested number of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from gspo.config import ModelConfig
from gspo.model.load import char_tokenizer, load_policy

CHILD = """
import torch
from gspo.config import ModelConfig
from gspo.model.load import char_tokenizer, load_policy

def threads(**model):
    load_policy(ModelConfig(build="tiny_dense", device="cpu", **model), char_tokenizer("0123"), seed=0)
    return torch.get_num_threads()

large = {"hidden_size": 512, "intermediate_size": 4096}
print(torch.get_num_threads(), threads(build_options=large), threads(threads=3))
print(threads(build_options=large), threads())
"""


def test_the_tests_use_the_threads_of_the_environment() -> None:
    requested = int(os.environ["OMP_NUM_THREADS"])
    assert torch.get_num_threads() == requested
    load_policy(ModelConfig(build="tiny_dense", device="cpu"), char_tokenizer("0123"), seed=0)
    assert torch.get_num_threads() == requested


def test_a_run_uses_the_threads_of_environment_or_setting_and_one_for_a_tiny_model() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1", "1", "3", "3", "1"], done.stderr[-2000:]
