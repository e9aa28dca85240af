"""Data that functions or libraries write into a worker's pipe is ignored or fails that call, never the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo.types import Status

CODE = """
    import os, sys
    def everywhere(data):
        for name in os.listdir("/proc/self/fd"):
            try:
                os.write(int(name), data)
            except OSError:
                pass
    def token():
        frame = sys._getframe()
        while "request" not in frame.f_locals or "token" not in frame.f_locals["request"]:
            frame = frame.f_back
        return frame.f_locals["request"]["token"].encode()
    def score(completions, **_):
        if "bad" in completions:
            everywhere({data})
        return [float(c != "bad") for c in completions]
"""
JUNK = [
    "b'forged\\n'",
    "b'without an end'",
    "b'{}\\n'",
    "b'[1]\\n'",
    "b'\\xff\\x00\\n' * 1000",
    'b\'{"id": 1}\\n{"id": 2}\\n\'',
    'b\'{"id": 1, "results": [{"value": 1}]}\\n\'',
    'b\'{"id": 2, "results": [{"value": 1}, {"value": 1}, {"value": 1}], "x": 1}\\n\'',
    'b\'{"failure": "raised: forged"}\\n\'',
]
FORGED = [
    "token() + b'nothing\\n'",
    "token() + b'{}\\n'",
    "token() + b'[]\\n'",
    "token() + b'{\"results\": []}\\n'",
    "token() + b'{\"results\": 3}\\n'",
    "token() + b'{\"failure\": 3}\\n'",
    'token() + b\'{"results": [{"value": "1"}]}\\n\'',
    'token() + b\'{"results": [{"value": 1, "odd": 2}]}\\n\'',
    'token() + b\'{"results": [{"value": Infinity}]}\\n\'',
    "token() + b'[' * 100000 + b'\\n'",
]


@pytest.mark.parametrize("data", JUNK)
def test_line_that_is_not_an_answer_is_ignored(
    make_pool: Any, group: Any, reward_file: Callable[..., str], data: str
) -> None:
    pool = make_pool(reward_file(CODE.format(data=data)))
    for _ in range(2):
        assert [s.reward for s in pool.score([group(["a", "bad", "b"])])[0]] == [1.0, 0.0, 1.0]
    assert [s.reward for s in pool.score([group(["a"])])[0]] == [1.0]


@pytest.mark.parametrize("data", [*FORGED, "b'x' * 2**25"])
def test_forged_answer_fails_only_its_own_call(
    make_pool: Any, group: Any, reward_file: Callable[..., str], data: str
) -> None:
    pool = make_pool(reward_file(CODE.format(data=data)), timeout_s=120.0)  # 32 MiB take a while on a busy machine
    good, bad, other = pool.score([group(["a", "bad", "b"])])[0]
    assert [s.reward for s in (good, other)] == [1.0, 1.0]
    assert (bad.status, bad.failure.partition(": ")[0]) == (Status.UNSCORED, "died")


def test_line_printed_while_the_functions_load_is_ignored(
    make_pool: Any, group: Any, reward_file: Callable[..., str]
) -> None:
    code = """
        import os
        for name in os.listdir("/proc/self/fd"):
            try:
                os.write(int(name), b'{"ready": true}\\n')
            except OSError:
                pass
        def score(completions, **_):
            return [1.0] * len(completions)
    """
    assert make_pool(reward_file(code)).score([group(["a"])])[0][0].reward == 1.0
