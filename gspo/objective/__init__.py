"""Stages 4 to 7: rewards to advantages, and tokens to a loss. `table.py` is the place to start.

`gspo.objective` is both this package and the public function that picks a row of the table, so the package is callable:
`gspo.objective("gspo", clip_low=3e-4)`.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.objective.objective import Objective


class _CallablePackage(types.ModuleType):
    def __call__(self, name: str, **settings: Any) -> Objective:
        """A row of the table with changed settings."""
        from gspo.objective.loss import build

        return build(name, **settings)


sys.modules[__name__].__class__ = _CallablePackage
