"""A decoding step, captured as a CUDA graph once per batch size and replayed afterwards.

In: a function of the number of rows whose kernel launches depend on nothing else. Out: the same effect, as one launch.
Invariant: a model whose step cannot be captured is still decoded, without CUDA graphs and with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from gspo.model.out_of_memory import out_of_memory


class CudaGraphs:
    """Calls `step` eagerly the first time a batch size occurs, and replays a CUDA graph from the second time on."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self.step = step
        self.graph: dict[int, Any] = {}
        self.warmed_up: set[int] = set()
        self.pool: Any = None
        self.captures = True

    def __call__(self, rows: int) -> None:
        # The eager first call compiles the Triton kernels: compilation is not allowed during capture.
        if self.captures and rows in self.warmed_up and rows not in self.graph:
            self._capture(rows)
        self.warmed_up.add(rows)
        # Capturing does not run the step, so a graph that was just captured is replayed at once.
        if rows in self.graph:
            self.graph[rows].replay()
        else:
            self.step(rows)

    def _capture(self, rows: int) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self.step(rows)
        except RuntimeError as problem:
            # Neither is a property of the model: the engine retries with fewer slots, or the CUDA context is lost.
            if out_of_memory(problem) or "illegal" in str(problem):
                raise
            self.captures = False
            reason = str(problem).strip().splitlines()[0]
            warnings.warn(
                f"engine 'local' decodes without CUDA graphs, which is slower: {reason}", RuntimeWarning, stacklevel=2
            )
            return
        self.graph[rows] = graph
        # All graphs share one memory pool: only one of them runs at a time.
        self.pool = graph.pool()
