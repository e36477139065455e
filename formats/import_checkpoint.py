"""Turns another program's checkpoint into a committed snapshot of ours, from which `run --start-from` begins in any layout.

`Foreign` → parts of a bounded size, each as if a rank had saved it → slabs and manifests → COMMIT. Each tensor consists of one or more
boxes (blocks of its elements), each with its offset in the tensor. Every part contains the values that are the same on all ranks.
"""

from __future__ import annotations

import math
import mmap
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.arena.arena import View
from ..checkpoint.arena.slot_header import Header, Stamp
from ..checkpoint.arena.staging import runs_of
from ..checkpoint.backend import paths
from ..checkpoint.backend.paths import Attempt
from ..checkpoint.backend.place import Place
from ..checkpoint.durable import catalog, commit
from ..checkpoint.durable.snapshot_view import Words
from ..checkpoint.format import fingerprint
from ..checkpoint.format.pytree_walk import flatten
from ..checkpoint.format.sharding import Part
from ..checkpoint.format.tensor_table import ITEM_BYTES, plan
from ..checkpoint.slabs.node_write import Share
from ..checkpoint.slabs.slab_writer import writer
from ..resilience import clock
from ..resilience.errors import MachineError, SnapshotError, UsageError
from .dcp_names import OPTIMIZER, Foreign, Found, FoundBox
from .torch_zip import Held

PART_BYTES = 1 << 30
"""Maximum bytes of one part, and of the memory that the import takes, unless a chunk of a tensor is larger."""


@dataclass(frozen=True)
class _Leaf:
    """Stands for a tensor in the state of a part."""

    dtype: str
    box: FoundBox
    parts: tuple[Part, ...]


def import_into(root: Place, foreign: Foreign, step: int | None = None, part_bytes: int = PART_BYTES) -> Place:
    """Import the checkpoint, and return the committed snapshot. step: the checkpoint's step, if the checkpoint does not contain it or
    contains a wrong one; None: use the step in the checkpoint.

    Raises UsageError if `root` has snapshots already or the step is unknown; SnapshotError if the checkpoint is damaged; MachineError if
    the snapshot cannot be written. After an error, nothing of the snapshot is left.
    """
    step = foreign.step if step is None else step
    if step is None or not 0 <= step < 1 << 60:
        raise UsageError("the checkpoint does not contain its step; nothing was imported. Give the step with --step")
    if not foreign.found:
        raise UsageError("the checkpoint has no tensors; nothing was imported")
    look = catalog.look(root)
    if look.durable or look.rejected or look.left or (root / paths.SNAPSHOTS).there(paths.JOB):
        raise UsageError(f"{root} already holds snapshots; nothing was imported. Name a new place")
    for left in look.remains:
        raise UsageError(
            f"{left.under(root)} belongs to another import, which still runs or was killed; nothing was imported. If no import "
            "runs, delete it, or name a new place"
        )
    names = Counter(name for found in foreign.found for name in (found.name, *found.also))
    for name, count in names.most_common(1):
        if count > 1:
            raise SnapshotError(f"the checkpoint has {count} tensors for {name}")
    snapshot = Attempt(run=secrets.token_hex(4), stamp=Stamp(1, 0, step)).under(root)
    values = {source: _plain(kept, source, foreign.left_out) for source, kept in foreign.values.items()}
    groups = _plain(foreign.groups, "param_groups", foreign.left_out)
    parts, write = list(_parts(foreign.found, part_bytes)), writer(root)
    try:
        for rank, boxes in enumerate(parts):
            state = _state(boxes, values, groups)
            Share.whole(_view(state, rank, len(parts))).write(snapshot, write)
        commit.commit(snapshot, len(parts), clock.wall_s())
    except BaseException as error:
        snapshot.clear()
        if isinstance(error, OSError):
            raise MachineError(f"{error.filename or root}: {error.strerror}; nothing was imported") from error
        raise
    return snapshot


def told(snapshot: Place, foreign: Foreign, where: str) -> str:
    """Return the message about an import."""
    nbytes = sum(math.prod(found.shape) * ITEM_BYTES[found.dtype] for found in foreign.found)
    values = f", the values of {', '.join(sorted(foreign.values))}" if foreign.values else ""
    lines = [
        f"{snapshot}: {len(foreign.found)} tensors ({nbytes / 1e6:.1f} MB){values}; next: mt-resilient run --start-from {where} -- …"
    ]
    if foreign.left_out:
        more = f" and {len(foreign.left_out) - 5} more" if len(foreign.left_out) > 5 else ""
        lines.append(f"not imported: {'; '.join(foreign.left_out[:5])}{more}")
    return "\n".join(lines)


def _parts(found: Sequence[Found], part_bytes: int) -> Iterator[list[tuple[Found, int, FoundBox]]]:
    held: list[tuple[Found, int, FoundBox]] = []
    total = 0
    for each in found:
        boxes = each.boxes or (
            FoundBox(offset=(0,) * len(each.shape), shape=each.shape, read=lambda: np.zeros(0, np.uint8)),
        )
        for number, box in enumerate(boxes):
            nbytes = math.prod(box.shape) * ITEM_BYTES[each.dtype]
            if held and total + nbytes > part_bytes:
                yield held
                held, total = [], 0
            held.append((each, number, box))
            total += nbytes
    yield held


def _state(
    boxes: Sequence[tuple[Found, int, FoundBox]], values: Mapping[str, Any], groups: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the state as `training/state/sources.py` collects it, with two differences. The keys of the model's tensors are global names
    here. Tensors of parameters whose group is unknown are under `other`."""
    state: dict[str, Any] = {}
    members = {
        name: f"{g}.{p}"
        for g, group in enumerate(groups)
        for p, name in enumerate(group.get("params", ()))
        if type(name) is str
    }
    has_optimizer = bool(groups) or any(found.name.startswith(f"{OPTIMIZER}/") for found, _, _ in boxes)
    if has_optimizer or OPTIMIZER in values:
        bare = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        state[OPTIMIZER] = {"0": {"groups": bare, "state": {}, "main": {}, "other": {}, **values.get(OPTIMIZER, {})}}
    state |= {source: kept for source, kept in values.items() if source != OPTIMIZER}
    for found, number, box in boxes:
        source, _, rest = found.name.partition("/")
        leaf = _Leaf(found.dtype, box, tuple(_part(found, name, box) for name in (found.name, *found.also)))
        kind, _, parameter = rest.partition("/")
        mark = f"#{number}" if len(found.boxes) > 1 else ""
        if source != OPTIMIZER or not parameter:
            state.setdefault(source, {})[f"{rest}{mark}"] = leaf
        elif parameter not in members:
            state[OPTIMIZER]["0"]["other"].setdefault(kind, {})[f"{parameter}{mark}"] = leaf
        elif kind == "main" and not mark:
            state[OPTIMIZER]["0"]["main"][members[parameter]] = leaf
        else:
            state[OPTIMIZER]["0"]["state"].setdefault(members[parameter], {})[f"{kind}{mark}"] = leaf
    return state


def _part(found: Found, name: str, box: FoundBox) -> Part:
    return Part(name=name, shape=found.shape, offset=box.offset, box=box.shape, padded=found.padded)


def _view(state: dict[str, Any], rank: int, world: int) -> View:
    """Return the state of a part in the form in which a sealed slot (the memory for a rank's part) would hold it."""
    skeleton, named = flatten(state, lambda value: isinstance(value, _Leaf))
    table = plan(
        skeleton,
        [(name, leaf.dtype, leaf.box.shape) for name, leaf in named],
        {name: leaf.parts for name, leaf in named},
    )
    image = table.image
    memory = memoryview(mmap.mmap(-1, image.memory_bytes))
    fingerprints = np.zeros(len(named), np.uint64)
    for number, (piece, (_, leaf)) in enumerate(zip(table.pieces, named, strict=True)):
        content = _bytes(leaf.box.read())
        if len(content) != piece.nbytes:
            raise SnapshotError(f"{piece.name} is of {len(content)} bytes, and should be of {piece.nbytes}")
        fingerprints[number] = fingerprint.of_bytes(content)
        done = 0
        for run in runs_of(image, piece, memory):
            run[:] = content[done : done + len(run)]
            done += len(run)
    header = Header(rank=rank, world=world, pieces=len(table.pieces), payload_bytes=table.payload_bytes)
    return View(header=header, table=table.to_json(), fingerprints=fingerprints, memory=memory)


def _bytes(words: Words) -> memoryview:
    return memoryview(np.ascontiguousarray(words).view(np.uint8).data).cast("B") if words.size else memoryview(b"")


def _plain(value: Any, where: str, left_out: list[str]) -> Any:
    """Return the parts of the value that a snapshot can hold. Tensors in it become leaves that are not part of a global tensor. Add the
    names of all other parts to `left_out`."""
    if isinstance(value, Held):
        whole = FoundBox(offset=(0,) * len(value.shape), shape=value.shape, read=value.content)
        return _Leaf(value.dtype, whole, ())
    if isinstance(value, dict):
        found = {
            key: _plain(inner, f"{where}/{key}", left_out) for key, inner in value.items() if type(key) in (str, int)
        }
        return {key: inner for key, inner in found.items() if inner is not _NOTHING}
    if isinstance(value, (list, tuple)):
        return type(value)(
            inner for n, each in enumerate(value) if (inner := _plain(each, f"{where}/{n}", left_out)) is not _NOTHING
        )
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    left_out.append(f"{where}: {getattr(value, 'named', type(value).__name__)}")
    return _NOTHING


_NOTHING = object()
