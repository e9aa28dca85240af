"""The worker process in which reward functions run (`python -m gspo.reward.worker`).

In: JSON lines on stdin: first the functions to load, then one request at a time, each with a token. Out: one line per
request, the token followed by JSON, on the pipe that was stdout when the process started. Invariant: functions run on
the main thread (math-verify's alarms need it), one at a time. They can neither read requests nor print into the
answers: their stdin is /dev/null, and their output goes to stderr, of which the trainer keeps a short tail. The process
ends with its trainer, and all processes that functions started end with it (`overseer.py`).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import suppress
from typing import Any, BinaryIO

from gspo.errors import ConfigError, GspoError
from gspo.reward.function import RewardFunction, RewardWarning, RunFacts, Source, load
from gspo.reward.overseer import leave_overseer


def main() -> None:
    """Serve until stdin closes."""
    leave_overseer()
    requests, answers = claim_pipes()
    worker = os.getpid()
    functions: list[RewardFunction] = []
    for line in requests:
        request = json.loads(line)
        answer = _answer(request, functions)
        if os.getpid() != worker:
            os._exit(0)  # a function forked and returned in the child: only the worker itself may answer
        flush_output()
        # allow_nan=False: NaN is not JSON, and the results were checked to be finite.
        write_all(answers, f"{request['token']}{json.dumps(answer, allow_nan=False)}\n".encode())
    os._exit(0)  # do not wait for threads that functions left behind


def _answer(request: dict[str, Any], functions: list[RewardFunction]) -> dict[str, Any]:
    if "load" in request:
        return _load(request, functions)
    function = functions[request["function"]]
    answers = function(request["calls"])
    return {"answers": [{"results": a} if isinstance(a, list) else a for a in answers], "usage": function.usage()}


def _load(request: dict[str, Any], functions: list[RewardFunction]) -> dict[str, Any]:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RewardWarning)
            functions[:] = [load(Source(**source)) for source in request["load"]]
            if request["start"] is not None:
                functions[request["start"]].start(RunFacts(**request["facts"]))
    except GspoError as error:
        return {"error": "config" if isinstance(error, ConfigError) else "reward", "message": str(error)}
    needs = [sorted(f.columns_needed) for f in functions]
    return {
        "needs": needs,
        "about": [f.about for f in functions],
        "bounded_s": [f.bounded_s for f in functions],
        "services": [f.service for f in functions],
        "warnings": [str(w.message) for w in caught if w.category is RewardWarning],
    }


def claim_pipes() -> tuple[BinaryIO, int]:
    """Move the protocol to descriptors that functions do not print to or read from."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    # What functions print goes to stderr, which the trainer drains and shows with a failure.
    os.dup2(2, 1)
    return requests, answers


def flush_output() -> None:
    """Flush the functions' output, so that it is attributed to the call that printed it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a function may have replaced the stream with anything
            stream.flush()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
