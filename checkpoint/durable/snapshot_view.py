"""Presents a snapshot's content to other formats, under names that are the same in every layout.

manifests of all ranks → whole tensors by name, and the other values, each listed once.

A tensor that is part of a global tensor has the global name: `model/decoder.layers.0.mlp.linear_fc1.weight`,
`optimizer/exp_avg/decoder.layers.0.mlp.linear_fc1.weight`. Any other tensor or value that is the same on all ranks keeps its name. A value
that differs from rank to rank (generators) gets the rank as a prefix: `rank-00003/randomness/torch`. A source is an object that the Session
saves, such as `model`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from ...resilience.errors import LayoutError, SnapshotError
from ..backend import paths
from ..format.manifest import RankManifest
from ..format.pytree import Tagged
from ..format.pytree_walk import flatten
from ..format.schema import checked
from ..format.sharding import Part, Shape, covers
from ..format.tensor_table import ITEM_BYTES, Piece
from .load_resharded import Saved, Wanted, word, words

LAYOUT_KEYS = ("is_expert_parallel",)
"""Keys of a parameter group that describe the layout, not the group. With an expert-parallel size of 1, experts are among the dense
parameters."""

BATCH_BYTES = 256 << 20
"""Maximum bytes that an export reads at a time, unless one tensor is larger."""

_Key = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\.")]
"""Key of a parameter in an optimizer's state. The number of the parameter's group precedes the dot."""

Words = NDArray[np.generic]
"""Elements of a tensor as uninterpreted words of an element's size."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A whole tensor that can be read."""

    name: str
    dtype: str
    shape: Shape
    own: tuple[int, Piece] | None = None
    """Rank and piece of a tensor that is not part of a global tensor."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class Contents:
    """A snapshot's tensors and values, as converters to other formats use them."""

    def __init__(self, saved: Saved) -> None:
        """Raises SnapshotError if a global tensor is incomplete, or the table claims more elements than its bytes can contain."""
        self.saved = saved
        self.tensors: dict[str, Tensor] = {}
        """The tensors by name, sorted."""
        self.values: dict[str, Any] = {}
        """All values that are not tensors, by source; or under `rank-00003`, then by source, if they differ from rank to rank. An optimizer
        has `param_groups`, each with its `params`, and the loss `scaler`."""
        found = [_global(saved, name) for name in saved.boxes]
        described = saved.described
        if not all(isinstance(state, dict) for state in described):
            raise SnapshotError(f"{saved.snapshot}: its state is no dict of sources; it is damaged")
        for source in dict.fromkeys(str(name) for state in described for name in state):
            kept = [state.get(source) for state in described]
            if all(_is_optimizer(state) for state in kept):
                self.values[source] = _optimizer_values(saved, source, kept)
                continue
            first, *others = (_told(manifest, state) for manifest, state in zip(saved.manifests, kept, strict=True))
            if all(other == first for other in others):
                found += self._own(0, source, kept[0], "")
            else:
                for rank, state in enumerate(kept):
                    found += self._own(rank, source, state, f"{paths.slab_name(rank)}/")
        self.tensors = {tensor.name: tensor for tensor in sorted(found, key=lambda tensor: tensor.name)}

    def _own(self, rank: int, source: str, state: Any, prefix: str) -> list[Tensor]:
        """Record one rank's values of a source. Return the rank's tensors that are not part of a global tensor."""
        target = self.values.setdefault(prefix.rstrip("/"), {}) if prefix else self.values
        plain = without_tensors(state)
        if plain not in ({}, None):
            target[source] = plain
        if prefix and not target:
            del self.values[prefix.rstrip("/")]
        return [
            Tensor(name=f"{prefix}{piece.name}", dtype=piece.dtype, shape=piece.shape, own=(rank, piece))
            for piece in pieces(state)
            if not piece.parts
        ]

    def read(self, tensors: Sequence[Tensor]) -> list[Words]:
        """Return the tensors' elements, row-major. Raises as `Saved.fill` does."""
        found = [words(t.dtype, t.shape, t.name) for t in tensors]
        wanted = [
            Wanted(t.name, t.dtype, [_box(t, (0,) * len(t.shape), t.shape)], memory)
            for t, memory in zip(tensors, found, strict=True)
            if t.own is None
        ]
        self.saved.fill(wanted)
        for tensor, memory in zip(tensors, found, strict=True):
            if tensor.own is not None:
                memory[...] = self.saved.content(*tensor.own).view(word(tensor.dtype))
        return found

    def read_box(self, tensor: Tensor, offset: Shape, box: Shape) -> Words:
        """Return the elements of a box of `tensor`, row-major. Reads only the chunks that contain the box. Raises as `Saved.fill` does."""
        if tensor.own is not None:
            (whole,) = self.read([tensor])
            at = tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))
            return whole.reshape(tensor.shape)[at].reshape(-1)
        memory = words(tensor.dtype, box, tensor.name)
        self.saved.fill([Wanted(tensor.name, tensor.dtype, [_box(tensor, offset, box)], memory)])
        return memory


def batches(tensors: Sequence[Tensor], limit_bytes: int = BATCH_BYTES) -> Iterator[list[Tensor]]:
    """Yield the tensors in the given order, in batches of at most `limit_bytes`. A larger tensor is a batch of its own."""
    batch: list[Tensor] = []
    total = 0
    for tensor in tensors:
        if batch and total + tensor.nbytes > limit_bytes:
            yield batch
            batch, total = [], 0
        batch.append(tensor)
        total += tensor.nbytes
    if batch:
        yield batch


def _box(tensor: Tensor, offset: Shape, box: Shape) -> Part:
    return Part(name=tensor.name, shape=tensor.shape, offset=offset, box=box)


def _global(saved: Saved, name: str) -> Tensor:
    """Return the global tensor that the saved parts form. Raises SnapshotError unless they cover all of it with bytes that exist."""
    boxes, (dtype, shape) = saved.boxes[name], saved.shapes[name]
    held = sum(math.prod(box.part.box) for box in boxes)
    there = sum({(box.rank, box.piece): saved.piece(box).nbytes for box in boxes}.values())
    whole = Tensor(name=name, dtype=dtype, shape=shape)
    if not boxes and 0 not in shape:
        raise SnapshotError(f"{saved.snapshot}: it holds nothing of {name} {shape}; it is damaged")
    if any((saved.piece(box).dtype, box.part.shape) != (dtype, shape) for box in boxes):
        raise SnapshotError(f"{saved.snapshot}: its ranks disagree on what {name} is; it is damaged")
    places = [(box.part.offset, box.part.box) for box in boxes]
    if there < whole.nbytes or not covers(places, (0,) * len(shape), shape):
        raise SnapshotError(
            f"{saved.snapshot}: it holds {held} of the {math.prod(shape)} elements of {name} {shape}, in {there} bytes, or some "
            "of them twice; it is damaged, or its ranks have not saved all of it"
        )
    return whole


def pieces(state: Any) -> Iterator[Piece]:
    """Yield all pieces (tensors' table entries) in a described state."""
    if isinstance(state, Piece):
        yield state
    elif isinstance(state, Mapping):
        for inner in state.values():
            yield from pieces(inner)
    elif isinstance(state, (list, tuple)):
        for inner in state:
            yield from pieces(inner)


def without_tensors(state: Any) -> Any:
    """Return a described state without its pieces, and without dicts that become empty."""
    if isinstance(state, Mapping):
        kept = {key: without_tensors(inner) for key, inner in state.items() if not isinstance(inner, Piece)}
        return {key: inner for key, inner in kept.items() if inner != {} or state[key] == {}}
    if isinstance(state, Tagged):
        return Tagged((state[0], without_tensors(state[1])))
    if isinstance(state, (list, tuple)):
        return [without_tensors(inner) for inner in state if not isinstance(inner, Piece)]
    return None if isinstance(state, Piece) else state


def _told(manifest: RankManifest, state: Any) -> tuple[str, list[tuple[str, str, Shape, str]]]:
    """Return a rank's values and tensors of a source, in a comparable form. The values are exact to the bit, so that equal NaNs compare
    equal. Each tensor that is not part of a global tensor is given with its fingerprint."""
    prints = dict(zip((piece.name for piece in manifest.table.pieces), manifest.fingerprints, strict=True))
    own = [(piece.name, piece.dtype, piece.shape, prints[piece.name]) for piece in pieces(state) if not piece.parts]
    return exactly(without_tensors(state)), own


def exactly(values: Any) -> str:
    return json.dumps(flatten(values, lambda leaf: False)[0])


def _is_optimizer(state: Any) -> bool:
    """Return whether `state` is an optimizer in the form of `training/state/sources.py`, and all of its tensors are parts of global
    tensors."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(isinstance(part, dict) and {"groups", "state", "main"} <= part.keys() for part in state.values())
        and all(
            piece.parts
            for part in state.values()
            for piece in pieces([part["state"], part["main"], part.get("further")])
        )
    )


def _optimizer_values(saved: Saved, source: str, kept: Sequence[Any]) -> dict[str, Any]:
    """Return the values of an optimizer. Groups with equal values are merged; other values (the loss scaler) are those of rank 0."""
    groups: dict[str, dict[str, Any]] = {}
    for parameter, told in sorted(parameter_values(saved, source).items()):
        _group(groups, told.group)["params"].append(parameter)
    for values in loose_groups(saved, source):
        _group(groups, values)
    other = {
        key: value for part in kept[0].values() for key, value in part.items() if key not in ("groups", "state", "main")
    }
    return {"param_groups": list(groups.values()), **without_tensors(other)}


def _group(groups: dict[str, dict[str, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry of `groups` whose values are equal to `values`, bit for bit. If no entry has these values, add one and return it."""
    told = without_tensors(values)
    in_order = dict(sorted(told.items(), key=lambda item: str(item[0])))
    return groups.setdefault(exactly(in_order), {"params": [], **told})


class Told(NamedTuple):
    """The values that an optimizer has for one parameter, apart from tensors."""

    group: Mapping[str, Any]
    """The values of the parameter's group."""
    state: Mapping[str, Any]
    """The values in the parameter's state."""


def parameter_values(saved: Saved, source: str) -> dict[str, Told]:
    """Return the values that the optimizer `source` has for each parameter, apart from tensors, by global name. Raises LayoutError if the
    values in a parameter's state differ from rank to rank."""
    values: dict[str, Told] = {}
    for part in optimizer_parts(saved, source):
        for key, state in part.state.items():
            plain = {name: value for name, value in state.items() if not isinstance(value, Piece)}
            told = Told(part.groups[int(key.split(".")[0])], plain)
            for piece in pieces([state, part.main.get(key)]):
                for place in piece.parts:
                    name = place.name.split("/", 2)[2]
                    before = values.setdefault(name, told)
                    if before is not told and (plain or before.state) and exactly(before.state) != exactly(plain):
                        raise LayoutError(
                            f"{saved.snapshot} cannot be taken to another parallel layout: the values of {source!r} for {name} differ from "
                            "rank to rank"
                        )
    return values


def loose_groups(saved: Saved, source: str) -> list[Mapping[str, Any]]:
    """Return the groups of an optimizer part that has no state for any parameter of the group."""
    return [
        group
        for part in optimizer_parts(saved, source)
        for number, group in enumerate(part.groups)
        if not any(key.startswith(f"{number}.") for key in part.state)
    ]


class _PartForm(Struct):
    """The saved form of an optimizer, or of one of the optimizers that it consists of, as `training/state/sources.py` creates it."""

    groups: list[dict[Any, Any]]
    state: dict[_Key, dict[Any, Any]]
    main: dict[str, Any]
    further: Any = None


def optimizer_parts(saved: Saved, source: str) -> Iterator[_PartForm]:
    """Yield the optimizer's parts of all ranks. Raises LayoutError if the snapshot has no such source, SnapshotError if the source is not
    an optimizer."""
    for manifest, described in zip(saved.manifests, saved.described, strict=True):
        if not isinstance(described, dict) or source not in described:
            raise LayoutError(f"{saved.snapshot} cannot be taken to this run: it has no {source}")
        where = f"{saved.snapshot}: rank {manifest.rank}'s description of {source}"
        for part in checked(described[source], dict[Any, _PartForm], where).values():
            places = (place for piece in pieces([part.state, part.main]) for place in piece.parts)
            if any(int(key.split(".")[0]) >= len(part.groups) for key in part.state) or any(
                place.name.count("/") < 2 for place in places
            ):
                raise SnapshotError(f"{where} names a group or a parameter that does not exist; it is damaged")
            yield part
