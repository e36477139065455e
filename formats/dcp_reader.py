"""Reads a torch.distributed.checkpoint directory without torch: `.metadata` shows the chunks of each tensor, and where each value is.

`.metadata` is a pickle of a few known classes of torch and Megatron. Each chunk of a tensor was written by a separate `torch.save`, at some
position in another file of the directory. A checkpoint is accepted only if the chunks contain each element of their tensors exactly once,
and the files are large enough for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.backend.filesystem import read_file
from ..checkpoint.format.sharding import Shape, covers
from ..checkpoint.format.tensor_table import ITEM_BYTES
from ..resilience.errors import MachineError, SnapshotError, UsageError
from . import safe_unpickle, torch_zip
from .safe_unpickle import Record, stand_in
from .torch_zip import Held

METADATA = ".metadata"
_CHECKPOINT = "torch.distributed.checkpoint"
_CLASSES = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo", "_StoragePrefix"),
    f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}


def _size(shape: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Stand in for torch.Size. Returns the tuple itself and no copy, because a hostile file could request copies without end."""
    if type(shape) is not tuple:
        raise SnapshotError("a size that is no tuple")
    return shape


_KNOWN: Mapping[str, Any] = {
    **{f"{module}.{name}": stand_in(name) for module, names in _CLASSES.items() for name in names},
    **{f"torch.{dtype}": dtype for dtype in ITEM_BYTES},
    "torch.Size": _size,
    "collections.OrderedDict": safe_unpickle.empty_dict,
}


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Where in the directory a chunk or a value is. `offset` and `length` are in bytes."""

    path: Path
    offset: int
    length: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box (a block of elements) of a tensor."""

    offset: Shape
    shape: Shape
    stored: Stored


@dataclass(frozen=True, kw_only=True)
class Chunked:
    """A tensor whose chunks hold each of its elements exactly once."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    def content(self, chunk: Chunk) -> NDArray[np.generic]:
        """Return a chunk's elements, row-major, as integers that have an element's size and bits. Raises SnapshotError if the chunk does
        not match the metadata."""
        found = torch_zip.load(chunk.stored.path, chunk.stored.offset, chunk.stored.length)
        if not isinstance(found, Held) or (found.dtype, math.prod(found.shape)) != (self.dtype, math.prod(chunk.shape)):
            raise SnapshotError(
                f"{chunk.stored.path}: {self.key} at {chunk.offset} is not the tensor that the metadata says; it is damaged"
            )
        return found.content()


@dataclass(frozen=True, kw_only=True)
class Dcp:
    """An opened checkpoint."""

    path: Path
    tensors: Mapping[str, Chunked]
    values: Mapping[str, Stored]
    """By key: where each value that is not a tensor is stored."""
    paths: Mapping[str, tuple[str | int, ...]]
    """By flat key: the nested keys from which torch made it."""

    def value(self, key: str) -> Any:
        """Return the value of `key` as `torch_zip.load` loads it, with a Record in place of each object that is not a plain value. Raises
        the errors of `torch_zip.load`."""
        stored = self.values[key]
        return torch_zip.load(stored.path, stored.offset, stored.length, lenient=True)


def open_dcp(path: Path) -> Dcp:
    """Return the checkpoint in the directory `path`. Raises UsageError if no checkpoint is there, SnapshotError if it is damaged,
    MachineError if it cannot be read."""
    file = path / METADATA
    try:
        data = read_file(file, safe_unpickle.MOST_BYTES)
        sizes = {each.name: each.stat().st_size for each in path.iterdir() if each.is_file()}
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path} is not a torch.distributed.checkpoint directory: it has no {METADATA}; nothing was imported"
        ) from None
    except OSError as error:
        raise MachineError(f"{path} cannot be read: {error.strerror}") from error
    found = safe_unpickle.read(data, str(file), _KNOWN)
    try:
        return _opened(path, found, sizes)
    except SnapshotError as error:
        raise SnapshotError(f"{file}: {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        raise SnapshotError(f"{file} does not describe a checkpoint ({type(error).__name__}); it is damaged") from None


def _opened(path: Path, metadata: Any, sizes: Mapping[str, int]) -> Dcp:
    if not isinstance(metadata, Record) or metadata.named != "Metadata":
        raise SnapshotError("it holds no Metadata; it is damaged")
    stored: dict[tuple[str, Any], Stored] = {}
    for index, info in metadata.field("storage_data").items():
        name, at, length = info.field("relative_path"), info.field("offset"), info.field("length")
        if (info.state or {}).get("transform_descriptors"):
            raise SnapshotError(
                "its files are transformed (such as compressed), which is not supported; save it without that"
            )
        if (
            name not in sizes
            or type(at) is not int
            or type(length) is not int
            or not 0 <= at <= at + length <= sizes[name]
        ):
            raise SnapshotError(f"{str(name)[:100]!r} is missing or cut off")
        stored[index.field("fqn"), index.state.get("offset")] = Stored(path=path / name, offset=at, length=length)
    tensors: dict[str, Chunked] = {}
    values: dict[str, Stored] = {}
    for key, said in metadata.field("state_dict_metadata").items():
        if said.named == "BytesStorageMetadata":
            values[key] = stored[key, None]
        else:
            tensors[key] = _tensor(key, said, stored)
    total = sum(math.prod(t.shape) * ITEM_BYTES[t.dtype] for t in tensors.values())
    if total > sum(sizes.values()):
        raise SnapshotError(f"its tensors need {total} bytes, and its files are smaller; it is damaged")
    return Dcp(path=path, tensors=tensors, values=values, paths=_paths(metadata.state.get("planner_data")))


def _tensor(key: str, said: Record, stored: Mapping[tuple[str, Any], Stored]) -> Chunked:
    properties = said.field("properties")
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.field("dtype")
    shape = said.field("size")
    if type(key) is not str or dtype not in ITEM_BYTES:
        raise SnapshotError(f"{str(key)[:200]} is of the type {str(dtype)[:50]}, which a snapshot cannot hold")
    chunks = []
    for one in said.field("chunks"):
        offset, box = one.field("offsets"), one.field("sizes")
        where = stored.get((key, offset)) or stored[key, None]
        if math.prod(box) * ITEM_BYTES[dtype] > where.length:
            raise SnapshotError(f"a chunk of {key[:200]} is larger than its bytes")
        chunks.append(Chunk(offset=offset, shape=box, stored=where))
    if not _make_up(shape, [(chunk.offset, chunk.shape) for chunk in chunks]):
        raise SnapshotError(f"the chunks of {key[:200]} do not contain each of its elements exactly once")
    return Chunked(key=key, dtype=dtype, shape=shape, chunks=tuple(chunk for chunk in chunks if math.prod(chunk.shape)))


def _make_up(shape: Shape, boxes: list[tuple[Shape, Shape]]) -> bool:
    """Return whether the boxes (offset, shape) fill `shape`, with each element in exactly one box."""
    sizes = [size for each in (shape, *(part for box in boxes for part in box)) for size in each]
    if any(type(size) is not int or not 0 <= size < 1 << 59 for size in sizes) or len(shape) > 32:
        return False
    if any(not len(shape) == len(offset) == len(box) for offset, box in boxes):
        return False
    if any(at + n > size for offset, box in boxes for at, n, size in zip(offset, box, shape, strict=True)):
        return False
    return covers(boxes, (0,) * len(shape), shape)


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Return, by key, the nested keys from which torch's planner made it. Megatron's planner does not save them."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        key: path
        for key, path in planner_data.items()
        if type(key) is str and type(path) is tuple and path and all(type(each) in (str, int) for each in path)
    }
