"""Reads files of `torch.save` without torch. A file of `torch.save` is a zip that contains one pickle and the bytes of each storage.

file → window (a byte range) → zip → pickle (`safe_unpickle.py` executes nothing in it) → plain values and `Held` tensors, whose bytes are
read on demand.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.backend.filesystem import open_file
from ..checkpoint.durable.load_resharded import word
from ..checkpoint.format.sharding import Shape
from ..checkpoint.format.tensor_table import ITEM_BYTES
from ..resilience.errors import MachineError, SnapshotError
from . import safe_unpickle
from .safe_unpickle import Record

_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Untyped": "",
}
_DEEPEST, _MOST_NODES = 64, 1_000_000
_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")


class _Storage(Record):
    """The type of a storage. dtype: the type of its elements; "": the tensor says the type."""

    dtype = ""


_KNOWN: Mapping[str, Any] = {
    **{f"torch.{dtype}": dtype for dtype in ITEM_BYTES},
    **{
        f"torch.{'storage.' if name == 'Untyped' else ''}{name}Storage": type("_Storage", (_Storage,), {"dtype": dtype})
        for name, dtype in _STORAGES.items()
    },
    **{f"torch._utils.{name}": safe_unpickle.stand_in(name) for name in _REBUILD},
    "collections.OrderedDict": safe_unpickle.empty_dict,
    "_codecs.encode": safe_unpickle.stand_in("bytes"),  # how protocol 2 writes bytes
}


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor in a zip, whose bytes are read on demand."""

    archive: zipfile.ZipFile
    entry: zipfile.ZipInfo
    where: str
    dtype: str
    shape: Shape
    offset: int
    """Number of elements of the storage before the tensor's first element."""
    strides: Shape

    def content(self) -> NDArray[np.generic]:
        """Return the elements, row-major, as integers that have an element's size and bits. Raises SnapshotError if they are damaged or cut
        off."""
        size = ITEM_BYTES[self.dtype]
        if not math.prod(self.shape):
            return np.zeros(0, word(self.dtype))
        memory = np.empty(self.entry.file_size // size * size, np.uint8)
        try:
            with self.archive.open(self.entry) as file:
                done = 0
                while done < len(memory) and (read := file.readinto(memory.data[done:])):  # type: ignore[attr-defined]
                    done += read
                file.read(1)  # at its end zipfile checks the checksum
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
            raise SnapshotError(f"{self.where} is damaged ({error})") from None
        if done < len(memory):
            raise SnapshotError(f"{self.where} is cut off")
        words = memory.view(word(self.dtype))
        strides = [stride * size for stride in self.strides]
        return np.ascontiguousarray(np.lib.stride_tricks.as_strided(words[self.offset :], self.shape, strides)).reshape(
            -1
        )


def load(path: Path, offset: int = 0, length: int | None = None, lenient: bool = False) -> Any:
    """Return the contents of a file from `offset` on: plain values, a `Held` for each tensor and, with `lenient`, a Record for any other
    object. The file stays open as long as a `Held` from it exists. Raises SnapshotError if the file is damaged or was not written
    by torch; MachineError if it cannot be read.
    """
    where = f"{path} at byte {offset}" if offset else str(path)
    try:
        window = _Window(os.fdopen(open_file(path), "rb", buffering=0), offset, length)
        return _load(zipfile.ZipFile(io.BufferedReader(window, 1 << 20)), where, lenient)
    except SnapshotError:
        raise
    except FileNotFoundError:
        raise SnapshotError(f"{path} is missing") from None
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a broken zip can cause struct.error and many other exceptions
        what = str(error) or type(error).__name__
        raise SnapshotError(f"{where} is not what torch.save writes ({what}); it is damaged") from None


def _load(archive: zipfile.ZipFile, where: str, lenient: bool) -> Any:
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    for entry in entries.values():
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise SnapshotError(
                f"{where}: {entry.filename[:100]!r} is compressed or encrypted, which torch.save does not do"
            )
    if "data.pkl" not in entries or entries["data.pkl"].file_size > safe_unpickle.MOST_BYTES:
        raise SnapshotError(f"{where} is not what torch.save writes: it has no data.pkl; it is damaged")
    if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
        raise SnapshotError(f"{where} was written by a big-endian machine, which is not supported")

    def storage(pid: Any) -> tuple[str, zipfile.ZipInfo]:
        kind, made, key = pid[:3]
        if kind != "storage" or not issubclass(made, _Storage):
            raise SnapshotError("a storage of an unknown kind")
        return made.dtype, entries[f"data/{key}"]

    found = safe_unpickle.read(archive.read(entries["data.pkl"]), where, _KNOWN, lenient, storage)
    return _Resolver(archive, where).resolved(found, 0)


class _Resolver:
    """Replaces each tensor by a Held. Refuses values that are nested deeper than any real state, or that contain themselves. Refuses values
    that refer to the same few values so often that resolving them would practically never end."""

    def __init__(self, archive: zipfile.ZipFile, where: str) -> None:
        self._archive, self._where = archive, where
        self._nodes = 0

    def resolved(self, node: Any, depth: int) -> Any:
        self._nodes += 1
        if depth > _DEEPEST or self._nodes > _MOST_NODES:
            raise SnapshotError(f"{self._where} is nested too deep, or has too many values; it is damaged")
        if isinstance(node, dict):
            return {key: self.resolved(inner, depth + 1) for key, inner in node.items()}
        if isinstance(node, (list, tuple)):
            return type(node)([self.resolved(inner, depth + 1) for inner in node])
        if isinstance(node, Record) and node.named in _REBUILD:
            return _held(node, self._archive, self._where)
        if isinstance(node, Record) and node.named == "bytes":
            text, encoding = node.args
            self._nodes += len(text) // 64
            return text.encode({"latin1": "latin1"}[encoding])
        if isinstance(node, Record):
            node.state = self.resolved(node.state, depth + 1) if isinstance(node.state, dict) else None
        return node


def _held(node: Record, archive: zipfile.ZipFile, where: str) -> Held:
    if node.named == "_rebuild_parameter":
        node = node.args[0]
    (dtype, entry), offset, shape, strides, *rest = node.args
    dtype = dtype or rest[2]
    numbers = [offset, *shape, *strides]
    good = (
        dtype in ITEM_BYTES
        and len(shape) == len(strides) <= 64
        and all(type(n) is int and 0 <= n < 1 << 59 for n in numbers)
    )
    if not good:
        raise SnapshotError(f"{where} has a tensor with an impossible dtype, shape or strides; it is damaged")
    room, elements = entry.file_size // ITEM_BYTES[dtype], math.prod(shape)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if elements and (last >= room or elements > room):
        raise SnapshotError(f"{where} has a tensor that is larger than its bytes; it is damaged")
    return Held(archive, entry, where, dtype, tuple(shape), offset, tuple(strides))


class _Window(io.RawIOBase):
    """A byte range of a file, which can be read like a file."""

    def __init__(self, file: Any, offset: int, length: int | None) -> None:
        self._file: BinaryIO = file
        size = os.fstat(file.fileno()).st_size
        self._start, self._end, self._at = offset, size if length is None else offset + length, 0
        if not 0 <= self._start <= self._end <= size:
            file.close()
            raise SnapshotError(f"{file.name} has {size} bytes, but data should follow at byte {offset}; it is cut off")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end - self._start}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        left = max(0, self._end - self._start - self._at)
        read = os.preadv(self._file.fileno(), [memoryview(buffer)[:left]], self._start + self._at) if left else 0
        self._at += read
        return read

    def close(self) -> None:
        self._file.close()
        super().close()
