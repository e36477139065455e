"""Read the values of a snapshot that are equal on all ranks of another parallel layout. A value that differs belongs to the former ranks.
The error names it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...checkpoint.durable.load_resharded import Saved
from ...checkpoint.format import pytree
from ...checkpoint.format.manifest import RankManifest
from ...checkpoint.format.tensor_table import Piece
from ...resilience.errors import LayoutError
from .modules.module_source import CHANGED, EXTRA


def agreed(saved: Saved, *path: str, everywhere: bool = False, but: str = "") -> Any:
    """Return the value at `path`, or None if no rank has one. Raises LayoutError if ranks have different values or, with `everywhere`, if a
    rank has none. but: a key below `path` that is ignored."""
    told = [(manifest, node) for manifest in saved.manifests if (node := node_at(manifest, path, but)) is not None]
    if everywhere and len(told) < len(saved.manifests):
        raise refused(saved, f"{_named(path)} is not on all ranks")
    for manifest, node in told[1:]:
        ours, theirs = _values(*told[0], path, but), _values(manifest, node, path, but)
        if ours != theirs:
            where = next(key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key))
            more = f", in {where}" if where else ""
            raise refused(saved, f"{_named(path)} differs from rank to rank{more}")
    if not told:
        return None
    manifest, node = told[0]
    held = {piece.name: _tensor(piece, saved.content(manifest.rank, piece)) for piece in _pieces(manifest, path, but)}
    return pytree.unflatten(node, held)


def node_at(manifest: RankManifest, path: Collection[str], but: str = "") -> Any:
    """Return the node at `path` in a rank's skeleton."""
    node = manifest.table.skeleton
    for key in path:
        node = next((inner for name, inner in (node or {}).get("dict", ()) if name == key), None)
    if but and isinstance(node, dict) and "dict" in node:
        return {"dict": [pair for pair in node["dict"] if pair[0] != but]}
    return node


def _pieces(manifest: RankManifest, path: Collection[str], but: str = "") -> list[Piece]:
    leaf = "/".join(path)
    prefix = f"{leaf}/"
    left_out = f"{prefix}{but}/" if but else "\0"
    return [
        piece
        for piece in manifest.table.pieces
        if piece.name == leaf or (piece.name.startswith(prefix) and not piece.name.startswith(left_out))
    ]


def _values(manifest: RankManifest, node: Any, path: Collection[str], but: str = "") -> dict[str, Any]:
    """Return all values at `path`, with fingerprints in place of tensors."""
    prints = dict(zip((piece.name for piece in manifest.table.pieces), manifest.fingerprints, strict=True))
    return dict(pytree.values(node)) | {piece.name: prints[piece.name] for piece in _pieces(manifest, path, but)}


def _named(path: Collection[str]) -> str:
    source, *rest = path
    what = (
        "the extra state of the module"
        if EXTRA in rest
        else "what has changed about"
        if CHANGED in rest
        else "the state"
    )
    inside = [key for key in rest if key not in (EXTRA, CHANGED)]
    return f"{what} {' '.join(map(repr, inside))} of {source!r}" if inside else f"{what} of {source!r}"


def refused(saved: Saved, why: str) -> LayoutError:
    """Return the error that says why the snapshot cannot be restored in another layout."""
    return LayoutError(f"{saved.snapshot} cannot be taken to another parallel layout: {why}")


def _tensor(piece: Piece, content: NDArray[np.uint8]) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype)
    if not content.size:  # torch can't view an empty tensor as another type
        return torch.empty(piece.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(content).view(dtype).view(piece.shape)
