"""A step captured once per batch size and replayed.

In: a function of the number of rows whose launches depend on nothing else. Out: the same effect, as one launch. Invariant:
a model whose step cannot be captured is decoded all the same, with a message.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from gspo.model.memory import out_of_memory


class CudaGraphs:
    """Calls `step`: the first time of a size as it is, which compiles kernels, then from a graph."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self.step = step
        self.graph: dict[int, Any] = {}
        self.tried: set[int] = set()
        self.pool: Any = None
        self.captures = True

    def __call__(self, rows: int) -> None:
        if self.captures and rows in self.tried and rows not in self.graph:
            self._capture(rows)
        self.tried.add(rows)
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
            if out_of_memory(problem) or "illegal" in str(problem):
                raise
            self.captures = False
            reason = str(problem).strip().splitlines()[0]
            warnings.warn(
                f"engine 'local' decodes without CUDA graphs, which is slower: {reason}", RuntimeWarning, stacklevel=2
            )
            return
        self.graph[rows], self.pool = graph, graph.pool()
