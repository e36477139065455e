"""Presents the values that a snapshot has for optimizers: those of parameter groups and of parameters, under names that are the same in
every layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from ...resilience.errors import LayoutError, SnapshotError
from ..format.pytree import Tagged
from ..format.pytree_walk import flatten
from ..format.schema import checked
from ..format.tensor_table import Piece
from .load_resharded import Saved

LAYOUT_KEYS = ("is_expert_parallel",)
"""Keys of a parameter group that describe the layout, not the group. With an expert-parallel size of 1, experts are among the dense
parameters."""

_Key = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\.")]
"""Key of a parameter in an optimizer's state. The number of the parameter's group precedes the dot."""


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


def exactly(values: Any) -> str:
    return json.dumps(flatten(values, lambda leaf: False)[0])


def is_optimizer(state: Any) -> bool:
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


def optimizer_values(saved: Saved, source: str, kept: Sequence[Any]) -> dict[str, Any]:
    """Return the values of an optimizer. Groups with equal values are merged, unless all ranks have the same groups in the same order.
    Other values (the loss scaler) are those of rank 0."""
    groups: dict[str, dict[str, Any]] = {}
    numbered = _numbered(saved, source)
    for number, group in enumerate(numbered):
        _group(groups, group, f"{number} ")
    for parameter, told in sorted(parameter_values(saved, source).items()):
        _group(groups, told.group, f"{told.number} " if numbered else "")["params"].append(parameter)
    for values in () if numbered else loose_groups(saved, source):
        _group(groups, values)
    other = {
        key: value for part in kept[0].values() for key, value in part.items() if key not in ("groups", "state", "main")
    }
    return {"param_groups": list(groups.values()), **without_tensors(other)}


def _numbered(saved: Saved, source: str) -> list[dict[Any, Any]]:
    """Return the optimizer's groups in their order, if it has one part, and all ranks have equal groups of each number. A framework creates
    as many groups again, and torch loads a checkpoint only into as many."""
    told = [without_tensors(part.groups) for part in optimizer_parts(saved, source)]
    return told[0] if len(told) == len(saved.manifests) and len(set(map(exactly, told))) == 1 else []


def _group(groups: dict[str, dict[str, Any]], values: Mapping[str, Any], number: str = "") -> dict[str, Any]:
    """Return the entry of `groups` with this number and with values that are equal to `values`, bit for bit. If there is none, add one and
    return it."""
    told = without_tensors(values)
    in_order = dict(sorted(told.items(), key=lambda item: str(item[0])))
    return groups.setdefault(f"{number}{exactly(in_order)}", {"params": [], **told})


class Told(NamedTuple):
    """The values that an optimizer has for one parameter, apart from tensors."""

    group: Mapping[str, Any]
    """The values of the parameter's group."""
    number: int
    """The group's number in its part of the optimizer."""
    state: Mapping[str, Any]
    """The values in the parameter's state."""


def parameter_values(saved: Saved, source: str) -> dict[str, Told]:
    """Return the values that the optimizer `source` has for each parameter, apart from tensors, by global name. Raises LayoutError if the
    values in a parameter's state differ from rank to rank."""
    values: dict[str, Told] = {}
    for part in optimizer_parts(saved, source):
        for key, state in part.state.items():
            plain = {name: value for name, value in state.items() if not isinstance(value, Piece)}
            number = int(key.split(".")[0])
            told = Told(part.groups[number], number, plain)
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
    """Return the groups of an optimizer part that has no tensor for any parameter of the group."""
    return [
        group
        for part in optimizer_parts(saved, source)
        for number, group in enumerate(part.groups)
        if not any(
            key.startswith(f"{number}.") and any(pieces([state, part.main.get(key)]))
            for key, state in part.state.items()
        )
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
