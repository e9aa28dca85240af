"""Programs and packages that some tests need.

`.ci/run` installs them and lists them in GSPO_TESTS_NEED. A test that cannot use a listed tool fails; otherwise it is
skipped.
"""

from __future__ import annotations

import importlib.util
import os

import pytest


def unusable(tool: str, why: str) -> None:
    """Skip on a machine without the tool; fail where it was installed for the tests."""
    if tool in os.environ.get("GSPO_TESTS_NEED", "").split():
        pytest.fail(f"{tool}: {why}, although GSPO_TESTS_NEED names it")
    pytest.skip(f"{tool}: {why}")


def needs_vllm() -> None:
    """For tests with the real vLLM, which `make test-vllm` installs."""
    if importlib.util.find_spec("vllm") is None:
        unusable("vllm", "not installed")
