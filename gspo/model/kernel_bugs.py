"""Errors in our own kernels. A trial falls back on any error in the model's own code, and would hide them.

In: the error of a trial. Out: a `KernelWarning` if one of our own kernels has raised it. Invariant: running out of
memory is no bug.
"""

from __future__ import annotations

import traceback
import warnings
from typing import Any

from gspo.errors import KernelWarning
from gspo.model.out_of_memory import out_of_memory

KERNELS = (
    "gspo.rollout.local.kernels",
    "gspo.model.kernels.experts",
    "gspo.model.kernels.fused_linear_logprobs",
    "gspo.model.kernels.packed_attention_triton",
)
"""How the names of modules with kernels begin. Attention functions are not among them: they refuse what they do not
support with an error."""


def warn_of_kernel_bug(problem: Exception, model: Any, stage: str) -> None:
    """Warn if a kernel has raised the error. `stage` is what the model was tried for."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(problem.__traceback__)]
    if not out_of_memory(problem) and any(name.startswith(KERNELS) for name in modules):
        warnings.warn(
            f"a kernel for {stage} fails for {type(model).__name__}; please report this bug",
            KernelWarning,
            stacklevel=3,
        )
