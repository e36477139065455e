"""Exports a snapshot to another format: selects parts of its state, writes the directory, and returns a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ..checkpoint.backend.filesystem import appearing
from ..checkpoint.backend.paths import Attempt
from ..checkpoint.backend.place import Place
from ..checkpoint.durable import commit
from ..checkpoint.durable.load_resharded import Saved
from ..checkpoint.durable.snapshot_view import Contents, Tensor
from ..resilience.errors import UsageError

Write: TypeAlias = Callable[[Contents, Sequence[Tensor], Mapping[str, object], Path], None]
"""A function that writes the tensors and values into an empty directory."""


def export(snapshot: Place, write: Write, target: Path, only: Sequence[str] = ()) -> str:
    """Write the directory `target` by `write`, and return a sentence about the export. only: the parts of the state to export, such as
    `model`; empty: all parts.

    Raises UsageError if `target` exists or a part does not; MachineError if `target` cannot be written; SnapshotError if the snapshot is
    damaged; LayoutError if ranks have trained different values of a tensor that counts as one.
    """
    with commit.reading(snapshot):
        contents = Contents(Saved(snapshot, proving=True), only)
        tensors = [tensor for tensor in contents.tensors.values() if not only or _part(tensor.name) in only]
        values = {source: told for source, told in contents.values.items() if not only or source in only}
        parts = {*map(_part, contents.tensors), *contents.values}
        missing = [part for part in only if part not in parts]
        if missing:
            raise UsageError(
                f"there is no {missing[0]} in {snapshot}; it has {', '.join(sorted(parts))}; nothing was exported"
            )
        attempt = Attempt.parse(snapshot.name)
        told = {"mt_resilient": {"snapshot": snapshot.name, "step": attempt.stamp.step if attempt else -1}}
        with appearing(target.absolute()) as directory:
            write(contents, tensors, values | told, directory)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    own = sum(tensor.own is not None for tensor in tensors)
    aside = f", {own} of them belong to one rank or have no position in a global tensor" if own else ""
    told_apart = [tensor.name for tensor in tensors if tensor.name in contents.apart]
    more = f" (and {len(told_apart) - 1} more)" if len(told_apart) > 1 else ""
    said = f". {told_apart[0]}{more} differs from rank to rank: the value is that of replica 0" if told_apart else ""
    size = f"{len(tensors)} tensors ({nbytes / 1e6:.1f} MB{aside})"
    return f"{snapshot.name}: {size} and the values of {len(values)} parts, in {target}{said}"


def _part(name: str) -> str:
    return name.partition("/")[0]
