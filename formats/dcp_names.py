"""Maps checkpoints of torch's DCP to the names that our own snapshots have for the same model.

The checkpoint must be the state dict that torch's `get_state_dict` returns, and that our own export writes: `model.<name>`,
`optimizer.state.<name>.exp_avg`, `optimizer.param_groups`. The path of any other value consists of its source (the saved object) and its
key. This module reads only small values; the tensors are read later.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.durable.snapshot_view import Words
from ..checkpoint.format.sharding import Shape
from ..resilience.errors import SnapshotError
from . import torch_zip
from .dcp_reader import Chunk, Chunked, Dcp, open_dcp

MODEL = "model"
OPTIMIZER = "optimizer"
_OWN = re.compile(r"rank-\d{5}")
"""The source, in our own exports, that belongs to one rank only. This source contains random generators, which cannot be used in another
layout."""
_ALIASES = {"optim": OPTIMIZER}


@dataclass(frozen=True, kw_only=True)
class FoundBox:
    offset: Shape
    shape: Shape
    read: Callable[[], Words]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A global tensor, as the boxes (blocks of its elements) that the checkpoint holds."""

    name: str
    dtype: str
    shape: Shape
    boxes: tuple[FoundBox, ...]
    also: tuple[str, ...] = ()
    """Other names for the same elements."""
    padded: bool = False
    """As in `sharding.Part`. The checkpoint does not say which tensors are padded; the run that restores them knows it."""


@dataclass(kw_only=True)
class Foreign:
    """Another program's checkpoint, ready to become a snapshot of ours."""

    step: int | None = None
    found: list[Found] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By source (the saved object): values that are the same on all ranks, with Held tensors among them."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups; with the names of their `params` if these are known."""
    left_out: list[str] = field(default_factory=list)


def from_torch(path: Path) -> Foreign:
    """Return the checkpoint. Raises UsageError if `path` is not a DCP checkpoint, SnapshotError if it is damaged."""
    dcp = open_dcp(path)
    nested = _values(dcp)
    ours = nested.pop("mt_resilient", None)
    step = ours.get("step") if isinstance(ours, dict) else nested.get("step", nested.get("iteration"))
    foreign = Foreign(step=step if type(step) is int else None)
    plain = {_ALIASES.get(str(key), str(key)): value for key, value in nested.items()}
    optimizer = plain.pop(OPTIMIZER, {})
    for source, value in plain.items():
        if _OWN.fullmatch(source):
            foreign.left_out.append(
                f"{source}: state of this rank alone (random generators, which start from the script's seed)"
            )
        elif source == MODEL:
            foreign.left_out.append(f"{source}: values that are not tensors (_extra_state)")
        elif isinstance(value, dict):
            foreign.values[source] = value
        elif source not in ("step", "iteration"):
            foreign.left_out.append(f"{source}: a value outside of the parts of the state")
    paths = {key: tuple(map(str, dcp.paths.get(key, (key,)))) for key in dcp.tensors}
    models = {f"{path[0]}/{'.'.join(path[1:])}" for path in paths.values() if len(path) > 1}
    for key, tensor in dcp.tensors.items():
        source, *rest = paths[key]
        source = _ALIASES.get(source, source)
        if _OWN.fullmatch(source):
            continue
        if source == OPTIMIZER and len(rest) >= 3 and rest[0] == "state":
            parameter = _qualified(".".join(rest[1:-1]), models)
            name = f"{OPTIMIZER}/{rest[-1]}/{parameter}"
        elif source == OPTIMIZER:
            foreign.left_out.append(f"{key}: a tensor among the values of an optimizer")
            continue
        elif source in foreign.values and rest:
            _put(foreign.values[source], rest, _held(tensor))
            continue
        else:
            name = f"{source}/{'.'.join(rest)}" if rest else f"{MODEL}/{source}"
        foreign.found.append(found_as(name, tensor))
    if isinstance(optimizer, dict):
        foreign.groups = _groups(optimizer.get("param_groups", []), models)
        if optimizer.get("state"):
            foreign.left_out.append(f"{OPTIMIZER}: values in its parameters' state that are not tensors")
        if "scaler" in optimizer:
            foreign.values[OPTIMIZER] = {"scaler": optimizer["scaler"]}
    return foreign


def _values(dcp: Dcp) -> dict[Any, Any]:
    """Return all values that are not tensors, nested as they were saved. A list that held tensors or dicts becomes a dict with numbers for
    keys."""
    nested: dict[Any, Any] = {}
    for key in dcp.values:
        _put(nested, dcp.paths.get(key, (key,)), dcp.value(key))
    return nested


def _put(into: dict[Any, Any], path: Any, value: Any) -> None:
    for key in path[:-1]:
        into = into.setdefault(key, {})
        if not isinstance(into, dict):
            raise SnapshotError(f"the checkpoint has something below the plain value {str(key)[:100]!r}; it is damaged")
    into[path[-1]] = value


def _qualified(parameter: str, models: set[str]) -> str:
    """Return the global name of a parameter. In an optimizer, torch names a parameter without its model."""
    if parameter in models or f"{MODEL}/{parameter}" in models:
        return parameter if parameter in models else f"{MODEL}/{parameter}"
    return next((name for name in sorted(models) if name.partition("/")[2] == parameter), f"{MODEL}/{parameter}")


def _groups(given: Any, models: set[str]) -> list[dict[str, Any]]:
    listed = (
        [given[key] for key in sorted(given, key=lambda key: (len(str(key)), str(key)))]
        if isinstance(given, dict)
        else given
    )
    found = []
    for group in listed if isinstance(listed, list) else ():
        if isinstance(group, dict):
            params = group.get("params", [])
            names = params.values() if isinstance(params, dict) else params
            found.append(group | {"params": [_qualified(str(name), models) for name in names]})
    return found


def found_as(name: str, tensor: Chunked, also: tuple[str, ...] = ()) -> Found:
    """Return the tensor under another name."""
    boxes = tuple(FoundBox(offset=c.offset, shape=c.shape, read=reader(tensor, c)) for c in tensor.chunks)
    return Found(name=name, dtype=tensor.dtype, shape=tensor.shape, boxes=boxes, also=also)


def reader(tensor: Chunked, chunk: Chunk, layer: int | None = None) -> Callable[[], Words]:
    """Return a function that reads a chunk. layer: read only this index of the chunk's first axis; None: read all."""
    if layer is None:
        return lambda: tensor.content(chunk)
    return lambda: tensor.content(chunk).reshape(chunk.shape[0], -1)[layer]


def _held(tensor: Chunked) -> Any:
    """Return a tensor of a scheduler or a similar object. The tensor must be in one chunk, because the tensors of such objects are
    small."""
    if len(tensor.chunks) != 1:
        raise SnapshotError(
            f"{tensor.key} is cut into {len(tensor.chunks)} chunks. This is not supported for a tensor among plain values"
        )
    stored = tensor.chunks[0].stored
    tensor.content(tensor.chunks[0])  # raises unless it is what the metadata says
    return torch_zip.load(stored.path, stored.offset, stored.length)
