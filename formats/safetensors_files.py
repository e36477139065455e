"""Writes a snapshot's tensors as safetensors, with a few tensors in memory at a time, into as many files as their size requires.

The format is eight bytes of length, a JSON header and the bytes (github.com/huggingface/safetensors). The format's own library can write
tensors only if all of them are in memory. The files have the names and the index that the format's readers expect. `state.json` in the same
directory contains all values that are not tensors.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..checkpoint.durable.snapshot_view import Contents, Tensor, batches
from ..checkpoint.format import pytree
from ..checkpoint.format.tensor_table import ITEM_BYTES
from ..resilience.errors import UsageError

FILE_BYTES = 5_000_000_000
"""Maximum bytes of one file, unless one tensor is larger. Hugging Face's hub uses the same limit."""

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float16": "F16",
    "bfloat16": "BF16",
    "int16": "I16",
    "uint16": "U16",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
}


def write(
    contents: Contents,
    tensors: Sequence[Tensor],
    values: Mapping[str, object],
    target: Path,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the files into the empty directory `target`. Raises UsageError, before anything is read, for a dtype that the format does not
    have; OSError if `target` cannot be written; and the errors of reading the snapshot."""
    for tensor in tensors:
        if tensor.dtype not in _DTYPES:
            raise UsageError(
                f"safetensors has no {tensor.dtype}, the dtype of {tensor.name}; nothing was exported. Use --to dcp, or export "
                "other parts of the state with --only"
            )
    files = list(batches(tensors, file_bytes)) or [[]]
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    for name, held in zip(names, files, strict=True):
        _write_file(contents, held, target / name)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
            "weight_map": {tensor.name: name for name, held in zip(names, files, strict=True) for tensor in held},
        }
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (target / "state.json").write_text(json.dumps(pytree.readable(values), indent=1))


def _write_file(contents: Contents, tensors: Sequence[Tensor], path: Path) -> None:
    # Tensors with the largest elements come first, so each tensor starts at a multiple of its elements' size.
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt", "snapshot": contents.saved.snapshot.name}}
    end = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for batch in batches(ordered):
            for content in contents.read(batch):
                file.write(content.data.cast("B") if content.size else b"")
        file.flush()
        os.fsync(file.fileno())
