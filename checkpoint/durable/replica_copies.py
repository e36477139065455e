"""Compares the copies of a tensor that several ranks have saved. A restore in another layout, and an export, use only one of the copies.

manifests of all ranks → copies of the same elements → copies whose fingerprints differ → a refusal, or names to report
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeAlias

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ...resilience.errors import LayoutError
from ..format.manifest import RankManifest
from ..format.replica_agreement import is_optimizer_s
from ..format.tensor_table import Piece
from .load_resharded import Saved

_CLOSE = 0.01
"""The largest distance of two copies that differ by rounding only, relative to their lengths as vectors. Copies on tensor-parallel ranks
begin equal, and their gradients are equal but for rounding. Parameters that each rank trains for itself are about as far apart as they are
long."""

_Copy: TypeAlias = tuple[RankManifest, Piece, str]
"""The manifest that lists the copy, its piece, and its fingerprint."""


def apart(saved: Saved, is_buffer: Callable[[str], bool], sources: Collection[str] | None = None) -> list[str]:
    """Return the global names of the tensors whose copies differ although one of them can stand for all: buffers, and copies that differ by
    rounding only. is_buffer: judges a model's tensor by its global name. sources: the saved objects to compare; None: all.

    Raises LayoutError if the copies of a parameter, or of an optimizer's tensor with several elements, differ otherwise: each rank has then
    trained its own. Data-parallel copies have equal bits, so they may not even differ by rounding. (The last index of `Part.replica` counts
    them.)"""
    kept: dict[Hashable, dict[Hashable, _Copy]] = {}
    found: dict[str, None] = {}
    for manifest in saved.manifests:
        for piece, word in zip(manifest.table.pieces, manifest.fingerprints, strict=True):
            outdated = any(part.is_outdated for part in piece.parts)
            if outdated or not piece.parts or (sources is not None and piece.name.partition("/")[0] not in sources):
                continue
            of_optimizer, name = is_optimizer_s(piece), piece.parts[0].name
            copies, copy = kept.setdefault(_elements(piece), {}), (manifest, piece, word)
            axes = piece.parts[0].replica[:-1]
            data_parallel = axes in copies
            other = copies.get(axes) or next(iter(copies.values()), copy)
            copies.setdefault(axes, copy)
            if other[2] == word or (of_optimizer and math.prod(piece.shape) == 1):
                continue
            may_differ = not of_optimizer and is_buffer(name)
            # An optimizer's copies on other axes are not judged by their values: the parameters tell more.
            rounded = not data_parallel and (of_optimizer or may_differ or _close(saved, other, copy))
            if not (may_differ or rounded):
                raise LayoutError(
                    f"{saved.snapshot} cannot be taken to another parallel layout or format: ranks {other[0].rank} and {manifest.rank} "
                    f"have different values of {name}, and each of them counts as a copy of the whole"
                )
            found[name] = None
    return list(found)


def _elements(piece: Piece) -> Hashable:
    """Return a key that is equal for copies of the same elements."""
    return piece.dtype, piece.shape, tuple(replace(part, replica=()) for part in piece.parts)


def _close(saved: Saved, *copies: _Copy) -> bool:
    """Return whether the values of two copies differ by rounding only."""
    one, two = (_numbers(piece.dtype, saved.content(manifest.rank, piece)) for manifest, piece, _ in copies)
    if one is None or two is None:
        return False
    return bool(np.linalg.norm(one - two) <= _CLOSE * max(np.linalg.norm(one), np.linalg.norm(two)))


def _numbers(dtype: str, content: NDArray[np.uint8]) -> NDArray[Any] | None:
    """Return the elements as numbers, with 0 for NaN; None for a dtype that is not compared by value."""
    if dtype == "bfloat16":
        return np.nan_to_num((content.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
    if dtype in ("float16", "float32", "float64"):
        return np.nan_to_num(content.view(dtype).astype(np.float64))
    return None
