"""Copies a slot's image, or the files of a snapshot, into live tensors. Fingerprints prove that each tensor has the bits that were
saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...resilience.errors import SnapshotError
from ..format import fingerprint
from ..format.tensor_table import Layout, Piece
from .staging import flat, lying

if TYPE_CHECKING:
    from torch import Tensor


def destinations(layout: Layout, live: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a tensor to fill for each piece (a tensor's entry in the table): the tensor of that name in `live` if it fits, else a new
    tensor on the CPU. Filling a live tensor saves a second copy."""
    import torch

    def fits(found: Any, piece: Piece) -> bool:
        return (
            isinstance(found, torch.Tensor)
            and str(found.dtype) == f"torch.{piece.dtype}"
            and tuple(found.shape) == piece.shape
            and found.is_contiguous()
            and not found.is_conj()
            and not found.is_neg()
        )

    return {
        piece.name: live[piece.name].detach()
        if fits(live.get(piece.name), piece)
        else torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device="cpu")
        for piece in layout.pieces
    }


def fill(
    layout: Layout,
    into: Mapping[str, Tensor],
    chunks: Iterable[tuple[int, memoryview]],
    fingerprints: NDArray[np.uint64],
) -> None:
    """Copy `chunks` into the tensors that `destinations` returned, or into some of them. Compare the filled tensors with `fingerprints`.
    `chunks` must yield every chunk, in any order. A chunk's memory may be reused once the next chunk is requested.

    Raises SnapshotError, naming the first tensor whose bits are not those that were saved.
    """
    import torch

    flats = {number: flat(into[piece.name]) for number, piece in enumerate(layout.pieces) if piece.name in into}
    by_chunk = layout.by_chunk()
    missing = Counter(number for held in by_chunk.values() for number, *_ in held)
    found = dict.fromkeys(flats, 0)
    away = {number: each for number, each in flats.items() if each.device.type != "cpu"}
    for index, memory in chunks:
        source = np.frombuffer(memory, np.uint8)
        for number, done, at, run in by_chunk.get(index, ()):
            if number not in flats:
                continue
            content = source[at : at + run]
            missing[number] -= 1
            if number in away:
                flats[number][done : done + run].copy_(torch.from_numpy(content))
            else:
                target = lying(flats[number])
                np.copyto(target[done : done + run], content)
                if missing[number] == 0:  # now, while the storage reads the next chunks
                    found[number] = fingerprint.of_bytes(target.data)
    if away:
        words = fingerprint.gather([fingerprint.on_device(each) for each in away.values()])
        found.update(zip(away, words.tolist(), strict=True))
    arrived(layout, found, fingerprints)


def arrived(layout: Layout, found: Mapping[int, int], fingerprints: NDArray[np.uint64]) -> None:
    """Compare the fingerprints `found`, keyed by the piece's number, with those computed when the pieces were saved. Raises as `fill`
    does."""
    for number, word in sorted(found.items()):
        if word != fingerprints[number]:
            raise SnapshotError(
                f"tensor {layout.pieces[number].name!r} arrived with the fingerprint {word:016x}, "
                f"and was saved with {fingerprints[number]:016x}"
            )
