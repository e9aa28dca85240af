"""Programs and packages that some tests need.

`.ci/run` installs them and names them in GSPO_TESTS_NEED. Then a test that cannot use one fails instead of skipping.
"""

from __future__ import annotations

import importlib.util
import os

import pytest


def unusable(tool: str, why: str) -> None:
    """Skip the test on a machine without the tool; fail it if the tool was installed for the tests."""
    if tool in os.environ.get("GSPO_TESTS_NEED", "").split():
        pytest.fail(f"{tool}: {why}, although GSPO_TESTS_NEED names it")
    pytest.skip(f"{tool}: {why}")


def needs_vllm() -> None:
    """Skip or fail a test without the real vLLM. `make test-vllm` installs it."""
    if importlib.util.find_spec("vllm") is None:
        unusable("vllm", "not installed")
