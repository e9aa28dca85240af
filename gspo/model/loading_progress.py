"""Progress of loading a model: counted as an activity instead of drawn by transformers.

In: the progress bars that transformers would draw. Out: an activity with their counts. Invariant: inside the context,
loading writes nothing to the terminal, with or without the command line's settings for libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from gspo.activity import counted


class _Bar:
    """Stands in for a tqdm bar."""

    def __init__(self, iterable: Iterable[Any] = (), *args: Any, **options: Any) -> None:
        self._items = iterable

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items) if isinstance(self._items, Sized) else 0
        return counted(self._items, "weights", total=total, unit="")

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """`update`, `close` and everything else that a bar can do."""
        return lambda *args, **options: None


@contextmanager
def counted_loading(gguf: bool) -> Iterator[None]:
    """Within this context, transformers reads a model without drawing bars. `gguf`: from a .gguf file."""
    from transformers.utils import logging

    before = logging.set_tqdm_hook(lambda factory, args, options: _Bar(*args, **options))
    try:
        if not gguf:
            yield
            return
        # Its reader draws with tqdm directly, which no setting reaches.
        from transformers import modeling_gguf_pytorch_utils as reader

        drawn = reader.tqdm
        reader.tqdm = _Bar
        try:
            yield
        finally:
            reader.tqdm = drawn
    finally:
        logging.set_tqdm_hook(before)
