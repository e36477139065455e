"""Restore values from another parallel layout that have no position in a global tensor. Such values are restored only if they are equal on
all ranks.

A value that differs between ranks belongs to the former ranks, so it can't be restored. The error names it, and nothing is restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import dropwhile
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from ...checkpoint.durable.load_resharded import Saved
from ...checkpoint.durable.snapshot_view import (
    LAYOUT_KEYS,
    exactly,
    loose_groups,
    optimizer_parts,
    parameter_values,
    pieces,
)
from ...checkpoint.format import pytree
from ...checkpoint.format.manifest import RankManifest
from ...checkpoint.format.sharding import Part
from ...checkpoint.format.tensor_table import Piece
from ...resilience.errors import LayoutError
from ...resilience.inprocess.tally import RANDOMNESS
from ..attach.rank_stderr import say
from ..state.modules.extra_state import FP8
from ..state.modules.module_source import ATTRIBUTES, CHANGED, EXTRA, Modules
from ..state.optimizers.optimizers import PUT_ON
from ..state.sharding import WRAPPED, model_parts
from ..state.tensors.in_place import Nested

_GROUP_KINDS = ("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "is_decoupled_lr")
"""Keys that identify Megatron's groups (megatron.core.optimizer, `param_group_identifier_keys`; NeMo's spelling too). These keys do not
depend on the layout."""


def shared(saved: Saved, names: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """Return the states of the sources (saved objects) `names`. Each state must be the same on all ranks."""
    found = {}
    for name in sorted(names):
        if any(_node(manifest, (name,)) for manifest in saved.manifests):
            found[name] = agreed(saved, name, everywhere=True, but=ATTRIBUTES)
            if told := attributes(saved, name):
                found[name][ATTRIBUTES] = told
        elif name not in optional:
            raise _refused(saved, f"it lacks the state of {name!r}")
    return found


def attributes(saved: Saved, name: str, modules: Modules | None = None) -> Any:
    """Return the attributes of the modules in the source `name`, under these modules' present names. If ranks had different values, the
    result is empty and the attributes start afresh, since a module may count something on its own rank only."""
    try:
        kept = agreed(saved, name, ATTRIBUTES, everywhere=True)
    except LayoutError:
        return {}
    if modules is None:
        return kept
    here = {_within(module): module for module in modules.by_name()}
    tag, told = kept
    own = {
        name: name if name[:1] == "." else here.get(_within(name)) for name in told
    }  # a leading dot marks a parameter, or hooks
    return pytree.Tagged((tag, {own[name]: each for name, each in told.items()})) if None not in own.values() else {}


def agreed(saved: Saved, *path: str, everywhere: bool = False, but: str = "") -> Any:
    """Return the value at `path`, or None if no rank has one. Raises LayoutError if ranks have different values or, with `everywhere`, if a
    rank has none. but: a key below `path` that is ignored."""
    told = [(manifest, node) for manifest in saved.manifests if (node := _node(manifest, path, but)) is not None]
    if everywhere and len(told) < len(saved.manifests):
        raise _refused(saved, f"{_named(path)} is not on all ranks")
    for manifest, node in told[1:]:
        ours, theirs = _values(*told[0], path, but), _values(manifest, node, path, but)
        if ours != theirs:
            where = next(key for key in (*ours, *theirs) if ours.get(key) != theirs.get(key))
            more = f", in {where}" if where else ""
            raise _refused(saved, f"{_named(path)} differs from rank to rank{more}")
    if not told:
        return None
    manifest, node = told[0]
    held = {piece.name: _tensor(piece, saved.content(manifest.rank, piece)) for piece in _pieces(manifest, path, but)}
    return pytree.unflatten(node, held)


def beside_tensors(saved: Saved, name: str, modules: Modules) -> Nested:
    """Return the extra state of the modules in the source `name`, and their changes, under their present names. A parameter is identified
    by its position in the global tensor, and a module by its name inside the outer wrappers."""
    frozen: dict[str, bool] = {}
    modes: dict[str, bool] = {}
    extra: Nested = {}
    changed: Nested = {}
    for manifest, described in zip(saved.manifests, saved.described, strict=True):
        told = described.get(name, {})
        places = {piece.name: piece.parts[0].name for piece in manifest.table.pieces if piece.parts}
        changed |= told.get(CHANGED, {})
        for key, flag in told.get(CHANGED, {}).get("requires_grad", {}).items():
            frozen[places.get(f"{name}/{key}", "")] = flag
        for module, said in told.get(EXTRA, {}).items():
            if _within(module) not in extra and any(map(_tells, said.values())):
                extra[_within(module)] = _extra(saved, name, module, only_scaling=set(said) == {FP8})
    if "training" in changed:
        modes = {
            _within(module): mode for module, mode in agreed(saved, name, CHANGED, "training", everywhere=True).items()
        }
    named = modules.by_name()
    here = set(map(_within, named))
    if missing := [module for module, said in extra.items() if module not in here and set(said) - {FP8}]:
        raise _refused(
            saved,
            f"it has extra state of the module {missing[0] or 'itself'} of {name!r}, and this run has no such module",
        )
    if (anew := [module for module, said in extra.items() if module in here and not said]) and _speaks():
        say(
            f"the FP8 scales and maxima of {len(anew)} modules in {name!r}, such as {anew[0] or 'itself'}, differ between the former "
            "ranks: they begin anew, as in a new model"
        )
    parts = model_parts(modules.chunks)
    return {
        CHANGED: {
            **changed,
            "requires_grad": {
                k: frozen[f"{name}/{p[0].name}"] for k, p in parts.items() if p and f"{name}/{p[0].name}" in frozen
            },
            "training": {module: modes[_within(module)] for module in named if _within(module) in modes},
        },
        EXTRA: {module: extra[_within(module)] for module in named if _within(module) in extra},
    }


def _extra(saved: Saved, name: str, module: str, only_scaling: bool) -> Any:
    """Return a module's extra state. Scales and maxima that differ are not restored: pipeline stages give different layers the same
    name."""
    try:
        return agreed(saved, name, EXTRA, module, everywhere=True)
    except LayoutError:
        if only_scaling:
            return {}
        raise


def tell_of_buffers(saved: Saved, name: str, modules: Modules) -> None:
    """Report buffers that differ between ranks. (Parameters are equal: replicas are compared during the training.)"""
    if all(getattr(chunk, "broadcast_buffers", False) for chunk in modules.chunks) or not _speaks():
        return
    parts = model_parts(modules.chunks)
    buffers = {f"{name}/{part.name}" for buffer in modules.buffers for part in parts.get(buffer, ())}
    found: dict[Part, str] = {}
    apart: dict[str, None] = {}
    for manifest in saved.manifests:
        for piece, word in zip(manifest.table.pieces, manifest.fingerprints, strict=True):
            for part in piece.parts if len(piece.parts) == 1 and piece.parts[0].name in buffers else ():
                if found.setdefault(replace(part, replica=()), word) != word:
                    apart[part.name.removeprefix(f"{name}/")] = None
    if apart:
        more = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
        say(
            f"the buffer {next(iter(apart))}{more} of {name!r} differs from rank to rank in the snapshot: all ranks continue "
            "with the value of replica 0"
        )


def tell_of_sums(saved: Saved) -> None:
    """Report that the snapshot contains accumulated gradients, which are lost."""
    if _speaks() and any(
        described.get(RANDOMNESS, {}).get("gradients", {}).get("sums") for described in saved.described
    ):
        say(
            "the snapshot was taken while gradients were added up over several steps of the session. The number of ranks has changed, so "
            "the sums of the former ranks are lost, and the sums begin at zero"
        )


def _speaks() -> bool:
    """Whether this rank reports what all ranks would report."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


def _within(module: str) -> str:
    """Return the module's name inside the module that a wrapper such as DistributedDataParallel wraps."""
    return ".".join(dropwhile(WRAPPED.__contains__, module.split(".")))


def has_places(saved: Saved, name: str) -> bool:
    """Whether the positions of parameters determine the position of the saved optimizer's whole state. Each parameter's state must have a
    tensor, and each such tensor a position."""
    for part in optimizer_parts(saved, name):
        for state in part.state.values():
            held = list(pieces(state))
            if state and not (held and all(piece.parts for piece in held)):
                return False
        if part.further is not None or any(pieces(part.groups)):
            return False
    return any(key.startswith(f"{name}/") for key in saved.boxes)


def by_parameter(saved: Saved, name: str, owned: Mapping[tuple[str, str], Any], kept: Nested) -> None:
    """Put into `kept` the values that the saved optimizer has for the same parameters: values of groups, of states, and of the loss
    scaler."""
    values, loose = parameter_values(saved, name), loose_groups(saved, name)
    for (index, key), parts in owned.items():
        number = int(key.split(".")[0])
        group, state = kept[index]["groups"][number], kept[index]["state"][key]
        for part in parts[:1]:
            told = values.get(part.name)
            found = told.group if told else _alike(group, loose) or _of_number(saved, name, index, number)
            group.update({k: v for k, v in found.items() if k not in LAYOUT_KEYS})
            state.update(told.state if told else {})
    for index, part in kept.items():
        if "scaler" in part:
            part["scaler"] = agreed(saved, name, index, "scaler") or part["scaler"]
        if told := agreed(saved, name, index, PUT_ON):
            part[PUT_ON] = told


def _alike(group: Mapping[str, Any], saved: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the saved group with the same multipliers, which also identify groups in Megatron. If the group has no multipliers, it must be
    the only group."""
    kind = {key: group[key] for key in _GROUP_KINDS if key in group}
    same = [each for each in saved if kind.items() <= {key: each.get(key) for key in _GROUP_KINDS}.items()]
    same.sort(key=lambda each: any(each.get(key) != group.get(key) for key in LAYOUT_KEYS))
    return same[0] if same and (kind or len(same) == 1) else {}


def _of_number(saved: Saved, name: str, index: str, number: int) -> Mapping[str, Any]:
    """Return the values of a group without a state, if the groups of this number are equal on all ranks."""
    parts = (described.get(name, {}).get(index, {}).get("groups", []) for described in saved.described)
    told = [groups[number] for groups in parts if number < len(groups)]
    if any(exactly(each) != exactly(told[0]) for each in told):
        raise _refused(
            saved,
            f"the options of group {number} of {name!r} differ between ranks, and without state its parameters cannot be identified",
        )
    return told[0] if told else {}


def _tells(said: Any) -> bool:
    """Whether a module's extra state is not empty. The method of most modules returns an empty state."""
    if isinstance(said, Mapping):
        return any(map(_tells, said.values()))
    return bool(said.nbytes) if isinstance(said, Piece) else said not in (None, b"")


def _node(manifest: RankManifest, path: Collection[str], but: str = "") -> Any:
    """Return the node at `path` in a rank's skeleton."""
    node = manifest.table.skeleton
    for key in path:
        node = next((inner for name, inner in (node or {}).get("dict", ()) if name == key), None)
    if but and isinstance(node, dict) and "dict" in node:
        return {"dict": [pair for pair in node["dict"] if pair[0] != but]}
    return node


def _pieces(manifest: RankManifest, path: Collection[str], but: str = "") -> list[Piece]:
    prefix = "/".join(path) + "/"
    left_out = f"{prefix}{but}/" if but else "\0"
    return [
        piece
        for piece in manifest.table.pieces
        if piece.name.startswith(prefix) and not piece.name.startswith(left_out)
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


def _refused(saved: Saved, why: str) -> LayoutError:
    return LayoutError(f"{saved.snapshot} cannot be taken to another parallel layout: {why}")


def _tensor(piece: Piece, content: NDArray[np.uint8]) -> torch.Tensor:
    dtype = getattr(torch, piece.dtype)
    if not content.size:  # torch can't view an empty tensor as another type
        return torch.empty(piece.shape, dtype=dtype, device="cpu")
    return torch.from_numpy(content).view(dtype).view(piece.shape)
