"""Restore values from another parallel layout that have no position in a global tensor. Such values are restored only if they are equal on
all ranks.

A value that differs between ranks belongs to the former ranks, so it can't be restored. The error names it, and nothing is restored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import dropwhile
from typing import Any

import torch

from ...checkpoint.durable.load_resharded import Saved
from ...checkpoint.durable.optimizer_view import (
    LAYOUT_KEYS,
    exactly,
    loose_groups,
    optimizer_parts,
    parameter_values,
    pieces,
)
from ...checkpoint.durable.replica_copies import apart
from ...checkpoint.format import pytree
from ...checkpoint.format.tensor_table import Piece
from ...resilience.errors import LayoutError
from ...resilience.inprocess.tally import RANDOMNESS
from ..attach.rank_stderr import say
from ..state.agreed_values import agreed, node_at, refused
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
        if any(node_at(manifest, (name,)) for manifest in saved.manifests):
            found[name] = agreed(saved, name, everywhere=True, but=ATTRIBUTES)
            if told := attributes(saved, name):
                found[name][ATTRIBUTES] = told
        elif name not in optional:
            raise refused(saved, f"it lacks the state of {name!r}")
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
        raise refused(
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


def refuse_or_tell_of_copies(saved: Saved, models: Mapping[str, Modules], sources: Collection[str]) -> None:
    """Report buffers of `models`, and other tensors, whose copies differ between ranks although one may stand for all (`apart`). Raises
    LayoutError if ranks have trained a tensor of `sources` each for itself."""
    quiet, buffers = set(), set()
    for name, model in models.items():
        parts = model_parts(model.chunks)
        own = {f"{name}/{part.name}" for buffer in model.buffers for part in parts.get(buffer, ())}
        buffers |= own
        if all(getattr(chunk, "broadcast_buffers", False) for chunk in model.chunks):
            quiet |= own
    found = [name for name in apart(saved, buffers.__contains__, sources) if name not in quiet]
    if found and _speaks():
        source, _, tensor = found[0].partition("/")
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        said = f"{tensor}{more} of {source!r} differs from rank to rank in the snapshot"
        say(f"{said}: all ranks continue with the value of replica 0")


def loose_buffers(saved: Saved, name: str, modules: Modules) -> dict[str, torch.Tensor]:
    """Return the buffers of the source `name` that have no known position, under their present names. A buffer that differs between the
    former ranks, or that has another shape here, is reported and left out: it keeps the value that the script has given it."""
    parts, live = model_parts(modules.chunks), modules.tensors()
    former = {_within(str(key)): str(key) for described in saved.described for key in described.get(name, {})}
    found, lost = {}, []
    for buffer in sorted(modules.buffers):
        if parts.get(buffer) or (key := former.get(_within(buffer))) is None:
            continue
        try:
            kept = agreed(saved, name, key)
        except LayoutError:
            kept = None
        if torch.is_tensor(kept) and (kept.shape, kept.dtype) == (live[buffer].shape, live[buffer].dtype):
            found[buffer] = kept
        else:
            lost.append(buffer)
    if lost and _speaks():
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        say(
            f"the position of the buffer {lost[0]}{more} of {name!r} is not known, and it differed from rank to rank or has another shape "
            "here: it keeps the value that the script has given it"
        )
    return found


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
    groups: dict[tuple[str, int], Mapping[str, Any]] = {}
    for (index, key), parts in owned.items():
        at = index, int(key.split(".")[0])
        told = values.get(parts[0].name) if parts else None
        if told:
            kept[index]["state"][key].update(told.state)
        if parts and not groups.get(at):
            groups[at] = told.group if told else {}
    for (index, number), known in groups.items():
        group = kept[index]["groups"][number]
        found = known or _alike(group, loose) or _of_number(saved, name, index, number, len(kept[index]["groups"]))
        group.update({k: v for k, v in found.items() if k not in LAYOUT_KEYS})
    for index, part in kept.items():
        if "scaler" in part:
            part["scaler"] = agreed(saved, name, index, "scaler") or part["scaler"]
        if told := agreed(saved, name, index, PUT_ON):
            part[PUT_ON] = told


def _alike(group: Mapping[str, Any], saved: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the saved group with the same multipliers, which also identify groups in Megatron; nothing if the group has none."""
    kind = {key: group[key] for key in _GROUP_KINDS if key in group}
    same = [each for each in saved if kind.items() <= {key: each.get(key) for key in _GROUP_KINDS}.items()]
    same.sort(key=lambda each: any(each.get(key) != group.get(key) for key in LAYOUT_KEYS))
    return same[0] if same and kind else {}


def _of_number(saved: Saved, name: str, index: str, number: int, groups: int) -> Mapping[str, Any]:
    """Return the values of a group whose parameters have no state, if all ranks had equal groups of this number. groups: how many groups
    the optimizer has here. If it had another number of them, the script has changed, and nothing identifies the group."""
    listed = [told for described in saved.described if (told := described.get(name, {}).get(index, {}).get("groups"))]
    if any(len(told) != groups for told in listed):
        return {}
    if any(exactly(told[number]) != exactly(listed[0][number]) for told in listed):
        raise refused(
            saved,
            f"the options of group {number} of {name!r} differ between ranks, and without state its parameters cannot be identified",
        )
    return listed[0][number] if listed else {}


def _tells(said: Any) -> bool:
    """Whether a module's extra state is not empty. The method of most modules returns an empty state."""
    if isinstance(said, Mapping):
        return any(map(_tells, said.values()))
    return bool(said.nbytes) if isinstance(said, Piece) else said not in (None, b"")
