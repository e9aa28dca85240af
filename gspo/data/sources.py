"""Rows of a data file or hub dataset, each with its location.

In: a path (.jsonl, .json, .csv, .parquet, and .gz of the first three) or a hub name. Out: every row in order, as plain
JSON values. Invariant: a row that cannot be read is still a row, with the reason in `fault`, so that row numbers never
shift. Only a file that cannot be read at all raises.
"""

from __future__ import annotations

import base64
import csv
import datetime
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.errors import DataError
from gspo.network.hub import unreachable_host

# The default of 131,072 characters is too small for some prompts. The limit must fit into a C long.
_LARGEST_CELL = 2**31 - 1
_DEEPEST = 100
"""Limit on the levels of lists and objects in a field."""
_MAX_RATIO = 50
"""Limit on decompressed size / compressed size."""
_LEAST_EXPANDED = 1 << 26
"""Decompressed bytes that are always allowed, whatever the ratio."""
_MOST_EXPANDED = 1 << 32
"""Decompressed bytes that are never exceeded, whatever the ratio."""
_TOO_DEEP = f"nested deeper than {_DEEPEST} levels of lists and objects; flatten it, or remove the field"
_MOST_ROWS = 10_000_000
_BATCH = 32
"""Rows of a parquet file that are read at a time. Few, because a value stored once may occur in every row."""


@dataclass(frozen=True, kw_only=True)
class Row:
    index: int
    """0-based number of the row in its source."""
    where: str
    """`FILE:LINE`, or `FILE: row N` for formats without lines; both count from 1."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why the row cannot be used; empty if it can."""


def check_file(path: str) -> None:
    """Refuse a missing data file or an unknown file type. It is cheap, so it can run before everything else."""
    file = Path(path).expanduser()
    _reader(file)
    if file.is_dir():
        raise DataError(f"{path}: is a directory; give one data file")
    if not file.is_file():
        raise DataError(f"{path}: no such file (looked in {file.absolute().parent})")


def read_file(path: str) -> list[Row]:
    """Every row of a data file."""
    check_file(path)
    file = Path(path).expanduser()
    reader = _reader(file)
    try:
        rows = list(reader(file))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def read_hub(name: str, *, config: str, split: str) -> list[Row]:
    """Every row of a split of a hub dataset; without a network, of the copy in the cache."""
    import datasets

    host = "" if Path(name).exists() else unreachable_host()
    try:
        with _offline(datasets.config) if host else nullcontext():
            rows = list(datasets.load_dataset(name, config or None, split=split))
    except Exception as error:  # `datasets` raises dozens of kinds: network, names, formats
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        if host and isinstance(error, OSError):
            reason = f"is not in the cache of datasets, and {host} cannot be reached"
        raise DataError(
            f"data.hub={name}: {reason}; check data.hub, data.hub_config and data.split={split}, "
            "or give a downloaded file as data.path"
        ) from None
    found = [_row(i, f"{name}: row {i + 1}", value) for i, value in enumerate(rows)]
    if not found:
        raise DataError(f"data.hub={name}: split {split} has no rows")
    return found


@contextmanager
def _offline(settings: Any) -> Iterator[None]:
    """Make `datasets` read its cache without a request. It would retry a request for half a minute."""
    before = settings.HF_HUB_OFFLINE
    settings.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        settings.HF_HUB_OFFLINE = before


def plain(value: Any, depth: int = _DEEPEST) -> Any:
    """The same value in JSON's types. Decimals become text, which keeps every digit; bytes become text or base64.

    Raises `RecursionError` for a value that is nested deeper than `_DEEPEST` levels."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if not depth:
        raise RecursionError(f"more than {_DEEPEST} levels of lists and objects")
    if isinstance(value, Mapping):
        return {str(key): plain(v, depth - 1) for key, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, depth - 1) for v in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray):
        return _text_or_base64(bytes(value))
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return plain(value.tolist(), depth - 1)
    return str(value)


# ------------------------------------------------------------------------------------------------- formats


def _reader(file: Path) -> Callable[[Path], Iterator[Row]]:
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    name = file.name.lower()
    for suffix, reader in readers.items():
        # Parquet compresses its own pages.
        if name.endswith(suffix) or (suffix != ".parquet" and name.endswith(f"{suffix}.gz")):
            return reader
    raise DataError(f"{file}: unknown file type; known: {', '.join(readers)} and .gz of the first three")


def _read_jsonl(file: Path) -> Iterator[Row]:
    index = 0
    # Split at \n only: JSON text may contain other characters that Python treats as line breaks.
    for line, raw in enumerate(_bytes(file).split(b"\n"), start=1):
        if raw.strip():
            yield _json_row(index, f"{file}:{line}", raw)
            index += 1


def _json_row(index: int, where: str, raw: bytes) -> Row:
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(index=index, where=where, fault=f"not UTF-8 text (byte {error.start + 1} of the line)")
    except RecursionError:
        return Row(index=index, where=where, fault=_TOO_DEEP)
    except ValueError as error:
        return Row(index=index, where=where, fault=f"invalid JSON: {error}")
    return _row(index, where, value)


def _read_json(file: Path) -> Iterator[Row]:
    text = _text(file)
    try:
        value = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        hint = "; one object per line? Then name it .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{file}:{error.lineno}: invalid JSON: {error.msg}{hint}") from None
    except RecursionError:
        raise DataError(f"{file}: {_TOO_DEEP}") from None
    except ValueError as error:
        raise DataError(f"{file}: invalid JSON: {error}") from None
    if isinstance(value, dict):
        # For example {"data": [...]} or {"version": 1, "examples": [...]}.
        lists = [v for v in value.values() if isinstance(v, list)]
        value = lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        raise DataError(f"{file}: must contain a list of objects, or an object with exactly one list")
    for index, item in enumerate(value):
        yield _row(index, f"{file}: row {index + 1}", item)


def _read_csv(file: Path) -> Iterator[Row]:
    # Strict: otherwise an unclosed quote silently swallows the rest of the file.
    reader = csv.reader(io.StringIO(_text(file), newline=""), strict=True)
    header = None
    index = 0
    limit = csv.field_size_limit(_LARGEST_CELL)
    line = 1
    try:
        for cells in reader:
            if header is None:
                header = _csv_header(file, cells) if cells else None
            elif cells:
                yield _csv_row(index, f"{file}:{line}", header, cells)
                index += 1
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{file}:{line}: invalid CSV: {error}; check the quotes of the row that starts here") from None
    finally:
        csv.field_size_limit(limit)


def _csv_header(file: Path, cells: list[str]) -> list[str]:
    repeated = sorted({name for name in cells if cells.count(name) > 1})
    if repeated:
        raise DataError(f"{file}:1: the header names {', '.join(map(repr, repeated))} more than once; rename one")
    return cells


def _csv_row(index: int, where: str, header: list[str], cells: list[str]) -> Row:
    if len(cells) != len(header):
        fault = f"has {len(cells)} cells, but the header has {len(header)}; put cells that contain commas in quotes"
        return Row(index=index, where=where, fault=fault)
    return Row(index=index, where=where, fields=dict(zip(header, cells, strict=True)))


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    index = 0
    try:
        source = pyarrow.parquet.ParquetFile(file)
        _check_expanded(file, _uncompressed_size(source.metadata))
        if source.metadata.num_rows > _MOST_ROWS:
            raise DataError(f"{file}: has {source.metadata.num_rows} rows, more than {_MOST_ROWS}; use a part of it")
        size = 0
        for batch in source.iter_batches(batch_size=_BATCH):
            values = batch.to_pylist()
            # Measured as it is read: the metadata can lie, and a dictionary page stores a value once that every row
            # repeats.
            size += _extent(values)
            _check_expanded(file, size)
            for value in values:
                yield _row(index, f"{file}: row {index + 1}", value)
                index += 1
    except (pyarrow.ArrowException, OverflowError, MemoryError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file}: not a readable parquet file: {reason}; write it again") from None


def _extent(value: Any) -> int:
    """Approximate bytes of a value as text."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_extent, value.values()))
    return 8 + sum(map(_extent, value)) if isinstance(value, list | tuple) else 8


def _uncompressed_size(metadata: Any) -> int:
    """Decompressed bytes of a parquet file's pages, according to its metadata."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return sum(group.column(i).total_uncompressed_size for group in groups for i in range(group.num_columns))


# ------------------------------------------------------------------------------------------------- pieces


def _row(index: int, where: str, value: Any) -> Row:
    if not isinstance(value, Mapping):
        kind = {list: "a list", str: "text", type(None): "null"}.get(type(value), "a plain value")
        return Row(index=index, where=where, fault=f"the row is {kind}, not an object with fields")
    fields = {}
    for key, field_value in value.items():
        try:
            fields[str(key)] = plain(field_value)
        except RecursionError:
            return Row(index=index, where=where, fault=f"field {str(key)[:80]!r}: {_TOO_DEEP}")
    return Row(index=index, where=where, fields=fields)


def _bytes(file: Path) -> bytes:
    try:
        data = _decompressed(file) if file.name.lower().endswith(".gz") else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file}: not a whole gzip file: {error}") from None
    # Windows programs write a byte order mark, which would become part of the first field name.
    return data.removeprefix(b"\xef\xbb\xbf")


def _decompressed(file: Path) -> bytes:
    parts = []
    size = 0
    with gzip.open(file) as source:
        while part := source.read(1 << 24):
            parts.append(part)
            size += len(part)
            _check_expanded(file, size)
    return b"".join(parts)


def _check_expanded(file: Path, size: int) -> None:
    """Refuse a small file that decompresses to a huge one: no real text is that compressible."""
    most = min(_MOST_EXPANDED, max(_LEAST_EXPANDED, _MAX_RATIO * file.stat().st_size))
    if size > most:
        raise DataError(
            f"{file}: grows from {file.stat().st_size} bytes to more than {most >> 20} MB when it is decompressed; "
            "if that is intended, decompress it and use the .jsonl or .csv file"
        )


def _text(file: Path) -> str:
    try:
        return _bytes(file).decode("utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}:{line}: not UTF-8 text; save the file as UTF-8") from None


def _text_or_base64(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(value).decode("ascii")
