"""A durable snapshot as a read-only store of zarr-python: `zarr.open_group(SnapshotStore("mt-runs/train"), mode="r")`.

This is the only module that needs zarr, which is an optional extra. The store assembles a chunk from the slabs (the snapshot's files) when
zarr requests it, and checks the checksums of all data that it reads. The store copies and converts nothing beforehand, and writes nothing.
"""

from __future__ import annotations

import asyncio
import json
import math
import warnings
import weakref
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

try:
    from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype
    from zarr.core.dtype import ZDType, data_type_registry
    from zarr.core.dtype.common import DataTypeValidationError, HasEndianness, HasItemSize
except ImportError as error:
    raise ImportError(f"zarr-python 3.1 or newer is needed ({error}): pip install 'mt-resilient[zarr]'") from error

from ..checkpoint.backend import paths
from ..checkpoint.durable import catalog, commit
from ..checkpoint.durable.load_resharded import Saved, word
from ..checkpoint.durable.snapshot_view import Contents
from ..checkpoint.format import pytree
from . import zarr_nodes
from .zarr_nodes import METADATA, Array


class SnapshotStore(Store):
    """The tensors of one snapshot by name: a group for each part of a name before a slash, and an array for each tensor. All values that
    are not tensors are in the root group's attribute `values`. The snapshot is not deleted as too old while the store is open. The snapshot
    is also kept for a store in another process, which received the store by pickle or by a fork."""

    def __init__(self, where: str, as_integers: bool = False) -> None:
        """where: a snapshot's directory, a run directory or the place of its snapshots (the newest snapshot is opened), or an s3:// or
        gs:// URL of one of these.

        as_integers: return bfloat16 and float8 as integers of their size. Without the package ml_dtypes, the store does so in any case, and
        a warning says so. Each array's attribute `dtype` names the true dtype.

        Raises UsageError if there is no snapshot, SnapshotError if it is damaged, MachineError if it cannot be read.
        """
        super().__init__(read_only=True)
        self.snapshot = catalog.find(where)
        self._held = ExitStack()
        weakref.finalize(self, self._held.close)
        self._held.enter_context(self.snapshot.reading(paths.COMMIT))
        with commit.reading(self.snapshot):
            self.contents = Contents(Saved(self.snapshot, proving=True))
            self._values = pytree.readable(self.contents.values)
        known = _register()
        held = {tensor.dtype for tensor in self.contents.tensors.values()} & zarr_nodes.FOREIGN
        if held and not (known or as_integers):
            warnings.warn(
                f"ml_dtypes is not installed: {', '.join(sorted(held))} are returned as integers of their size",
                stacklevel=2,
            )
        names = self.contents.tensors.keys()
        prefixes = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
        self.arrays = {
            zarr_nodes.path_of(name, {f"{name}/"} if name in prefixes else ()): Array(tensor, as_integers or not known)
            for name, tensor in self.contents.tensors.items()
        }
        """The arrays by path; `zarr_nodes.name_of` returns the tensor's name."""
        self._children: dict[str, dict[str, None]] = {"": {METADATA: None}}
        for path in self.arrays:
            parts = path.split("/")
            for depth, part in enumerate(parts):
                self._children.setdefault("/".join(parts[:depth]), {METADATA: None})[part] = None
        # `where` is not used here, because its newest snapshot may be another one when this store is unpickled.
        self._arguments = (str(self.snapshot), as_integers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SnapshotStore) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __reduce__(self) -> tuple[Any, ...]:
        return SnapshotStore, self._arguments

    def __repr__(self) -> str:
        return f"SnapshotStore({str(self.snapshot)!r})"

    @property
    def _identity(self) -> tuple[str, bool]:
        return self.snapshot.address, self._arguments[1]

    def close(self) -> None:
        super().close()
        self._held.close()

    # -- what zarr asks for ---------------------------------------------------------------------------------------------

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        content = self._document(key)
        if content is None and (found := self._chunk_of(key)) is not None:
            content = await asyncio.to_thread(self._chunk, *found)
        return None if content is None else prototype.buffer.from_bytes(_ranged(content, byte_range))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return self._document(key) is not None or self._chunk_of(key) is not None

    async def list(self) -> AsyncIterator[str]:
        for group in self._children:
            yield f"{group}/{METADATA}".lstrip("/")
        for path, array in self.arrays.items():
            yield f"{path}/{METADATA}"
            for key in array.chunk_keys():
                yield f"{path}/{key}"

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        async for key in self.list():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        here = prefix.strip("/")
        for child in (METADATA, "c") if here in self.arrays else self._children.get(here, ()):
            yield child

    supports_writes = False
    supports_deletes = False
    supports_listing = True
    supports_consolidated_metadata = False

    async def set(self, key: str, value: Buffer) -> None:
        self._check_writable()

    async def delete(self, key: str) -> None:
        self._check_writable()

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _document(self, key: str) -> bytes | None:
        path, _, last = key.rpartition("/")
        if last != METADATA:
            return None
        if path in self.arrays:
            return json.dumps(self.arrays[path].metadata()).encode()
        if path not in self._children:
            return None
        told = {"snapshot": str(self.snapshot), "values": self._values} if not path else {}
        return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": told}).encode()

    def _chunk_of(self, key: str) -> tuple[Array, tuple[int, ...]] | None:
        """Return the array and the chunk's indexes. The array's path may also contain a part "c", but only the last "c" of the key is
        followed by one number for each axis."""
        parts = key.split("/")
        numbers = next((n for n, part in enumerate(reversed(parts)) if part == "c"), -1)
        array = self.arrays.get("/".join(parts[: len(parts) - numbers - 1]))
        indexes = parts[len(parts) - numbers :]
        if array is None or len(indexes) != len(array.tensor.shape) or not all(index.isdecimal() for index in indexes):
            return None
        found = tuple(map(int, indexes))
        return (array, found) if array.box(found) is not None else None

    def _chunk(self, array: Array, indexes: tuple[int, ...]) -> bytes:
        """Return the whole chunk, with zeros beyond the tensor's end."""
        box = array.box(indexes)
        assert box is not None
        with commit.reading(self.snapshot):
            content = self.contents.read_box(array.tensor, *box)
        if box[1] == array.chunk:
            return content.tobytes()
        whole = np.zeros(array.chunk, word(array.tensor.dtype))
        whole[tuple(slice(size) for size in box[1])] = content.reshape(box[1])
        return whole.tobytes()


def _ranged(content: bytes, wanted: ByteRequest | None) -> bytes:
    match wanted:
        case RangeByteRequest(start, end):
            return content[start:end]
        case OffsetByteRequest(offset):
            return content[offset:]
        case SuffixByteRequest(suffix):
            return content[max(len(content) - suffix, 0) :]
    return content


def _register() -> bool:
    """Register tensorstore's names of bfloat16 and float8 with zarr-python, if they are unknown there. One array of an unknown dtype breaks
    the listing of its whole group (zarr-python 3.1.6). Return False if ml_dtypes is not installed."""
    try:
        import ml_dtypes
    except ImportError:
        return False
    for name in sorted(zarr_nodes.FOREIGN - data_type_registry.contents.keys()):
        data_type_registry.register(name, _data_type(name, np.dtype(getattr(ml_dtypes, name))))
    return True


def _data_type(name: str, native: np.dtype[Any]) -> Any:
    """Return a zarr data type without parameters."""

    @dataclass(frozen=True, kw_only=True)
    class Registered(ZDType, HasEndianness, HasItemSize):  # type: ignore[misc,type-arg]
        dtype_cls: ClassVar[Any] = type(native)
        _zarr_v3_name: ClassVar[str] = name

        @classmethod
        def from_native_dtype(cls, dtype: Any) -> Any:
            if dtype != native:
                raise DataTypeValidationError(f"{dtype} is not {name}")
            return cls()

        @classmethod
        def _from_json_v2(cls, data: Any) -> Any:
            raise DataTypeValidationError(f"{name} is of zarr v3 only")

        @classmethod
        def _from_json_v3(cls, data: Any) -> Any:
            if data != name:
                raise DataTypeValidationError(f"{data!r} is not {name}")
            return cls()

        def to_native_dtype(self) -> Any:
            return native

        def to_json(self, zarr_format: Any) -> Any:
            return name

        def _check_scalar(self, data: object) -> bool:
            return isinstance(data, (int, float, np.number, native.type))

        def cast_scalar(self, data: object) -> Any:
            return native.type(data)

        def default_scalar(self) -> Any:
            return native.type(0)

        def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
            return native.type(float(data))  # also "NaN", "Infinity", "-Infinity"

        def to_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
            value = float(data)
            return value if math.isfinite(value) else {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")

        @property
        def item_size(self) -> int:
            return native.itemsize

    return Registered
