"""Maps Megatron's own checkpoints (`dist_checkpointing`, format torch_dist) to the names that our snapshots have for the same model.

Megatron's own checkpoint is a DCP directory (`.metadata`, `__*.distcp`). The checkpoint's keys are the model's names, with the layers of a
block stacked in one tensor, and `optimizer.state.exp_avg.<name>`. The directory also has metadata.json, which says the format, and
common.pt, which has the iteration, the schedule and the values of parameter groups. Nothing in common.pt is executed either, because
stand-ins replace its classes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.backend.filesystem import read_file
from ..checkpoint.durable.snapshot_view import Words
from ..resilience.errors import SnapshotError, UsageError
from . import torch_zip
from .dcp_names import MODEL, OPTIMIZER, Foreign, Found, FoundBox, found_as, reader
from .dcp_reader import METADATA, Chunked, open_dcp
from .torch_zip import Held

_STACKED = re.compile(r"(^|\.)layers\.(?!\d+\.)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_MAIN = {"param": "main", "fp32_param": "main", "master_param": "main"}
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_")
_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def megatron_directory(path: Path) -> Path:
    """Return `path` itself, or its subdirectory iter_XXXXXXX/ that was saved last. Raises UsageError if that is not a checkpoint of this
    format."""
    latest = path / "latest_checkpointed_iteration.txt"
    if latest.is_file():
        said = latest.read_bytes()[:20].decode(errors="replace").strip()
        path = path / (f"iter_{int(said):07d}" if said.isdecimal() else said)
    if not (path / METADATA).is_file():
        raise UsageError(
            f"{path} is not a Megatron checkpoint in the format torch_dist (it has no {METADATA}); nothing was imported. Name an iter_… "
            "directory, or the one above them"
        )
    return path


def from_megatron(given: Path) -> Foreign:
    """Return the checkpoint. Raises UsageError if there is no checkpoint, or if checkpoints of its kind cannot be restored in another
    layout; SnapshotError if it is damaged."""
    path = megatron_directory(given)
    _check_format(path)
    dcp = open_dcp(path)
    if any(_BUCKETS.match(key) for key in dcp.tensors):
        raise UsageError(
            f"{path} has the optimizer in Megatron's buckets (dp_reshardable), which do not say to which "
            "parameters their elements belong; nothing was imported. Save it again with --dist-ckpt-optim-fully-reshardable"
        )
    common = torch_zip.load(path / "common.pt", lenient=True) if (path / "common.pt").is_file() else {}
    if not isinstance(common, dict):
        raise SnapshotError(f"{path / 'common.pt'} is not a dict; it is damaged")
    step = common.get("iteration")
    foreign = Foreign(step=step if type(step) is int else _iteration_of(path))
    states = {key: match for key in dcp.tensors if (match := _STATE.fullmatch(key))}
    for key, match in states.items():
        parameter = dcp.tensors.get(match[2])
        if parameter is not None and parameter.shape != dcp.tensors[key].shape:
            raise UsageError(
                f"{path} has the optimizer in flat shards (Megatron before 0.15), which cannot be imported; nothing was imported. Load "
                "and save it again with a newer Megatron and --dist-ckpt-optim-fully-reshardable"
            )
    has_main = any(_MAIN.get(match[1]) for match in states.values())
    for key, tensor in dcp.tensors.items():
        match = states.get(key)
        prefix = f"{OPTIMIZER}/{_MAIN.get(match[1], match[1])}/{MODEL}/" if match else f"{MODEL}/"
        bare = match[2] if match else key
        # If the parameters are fp32, an optimizer that does not shard them has no copies of its own.
        alias = (
            f"{OPTIMIZER}/main/{MODEL}/" if states and not has_main and not match and tensor.dtype == "float32" else ""
        )
        foreign.found += _unstacked(prefix, alias, bare, tensor)
    foreign.groups = list(_megatron_groups(common.get(OPTIMIZER)))
    steps = _steps(common.get(OPTIMIZER)) if states else set()
    if len(steps) > 1:
        raise UsageError(
            f"{path} has parameters at {len(steps)} different steps of the optimizer; nothing was imported"
        )
    for value in steps:
        state = next(iter(states.values()))[1]
        moment = f"{OPTIMIZER}/{_MAIN.get(state, state)}/"
        foreign.found += [_step(each, moment, value) for each in foreign.found if each.name.startswith(moment)]
    if isinstance(common.get("opt_param_scheduler"), dict):
        foreign.values["scheduler"] = common["opt_param_scheduler"]
    foreign.values["counters"] = _counters(common, foreign.step)
    extra = [key for key in dcp.values if "_extra_state" in key and dcp.value(key) != [None]]
    if extra:
        foreign.left_out.append(f"{len(extra)} times Transformer Engine's _extra_state (FP8 scales)")
    if any(key.startswith("rng_state") for key in dcp.values):
        foreign.left_out.append("rng_state: random generators, which start from the script's seed")
    return foreign


def _check_format(path: Path) -> None:
    try:
        said = json.loads(read_file(path / "metadata.json"))
        backend = said.get("sharded_backend")
    except FileNotFoundError:
        return
    except (ValueError, AttributeError, RecursionError) as error:
        raise SnapshotError(f"{path / 'metadata.json'} is not readable ({error}); it is damaged") from None
    if backend != "torch_dist":
        raise UsageError(
            f"{path} is in Megatron's format {str(backend)[:50]!r}, and only torch_dist can be read; nothing was imported"
        )


def _iteration_of(path: Path) -> int | None:
    found = re.fullmatch(r"iter_(\d{1,18})", path.name)
    return int(found[1]) if found else None


def _unstacked(prefix: str, alias: str, key: str, tensor: Chunked) -> Iterator[Found]:
    """Yield one tensor for each layer, as our snapshots name them. Megatron has one tensor for all layers of a block."""
    stacked = _STACKED.search(key)
    if not stacked or not tensor.shape:
        also = (f"{alias}{key}",) if alias else ()
        yield replace(found_as(f"{prefix}{key}", tensor, also), padded=bool(tensor.shape))
        return
    for layer in range(tensor.shape[0]):
        name = f"{key[: stacked.end()]}{layer}.{key[stacked.end() :]}"
        boxes = [
            FoundBox(offset=c.offset[1:], shape=c.shape[1:], read=reader(tensor, c, layer - c.offset[0]))
            for c in tensor.chunks
            if c.offset[0] <= layer < c.offset[0] + c.shape[0]
        ]
        also = (f"{alias}{name}",) if alias else ()
        shape = tensor.shape[1:]
        yield Found(
            name=f"{prefix}{name}", dtype=tensor.dtype, shape=shape, boxes=tuple(boxes), also=also, padded=bool(shape)
        )


def _step(moment: Found, prefix: str, value: float) -> Found:
    """Return the step count that torch's Adam keeps for each parameter, or for each of several stacked experts. Megatron saves one step
    count for all parameters."""
    experts = ".experts." in moment.name and len(moment.shape) > 2 and all(box.shape[0] == 1 for box in moment.boxes)
    shape = moment.shape[:1] if experts else ()

    def read() -> Words:
        return np.full(math.prod(shape), value, np.float32).view(np.uint32)

    name = f"{OPTIMIZER}/step/{moment.name.removeprefix(prefix)}"
    return Found(
        name=name, dtype="float32", shape=shape, boxes=(FoundBox(offset=(0,) * len(shape), shape=shape, read=read),)
    )


def _megatron_groups(optimizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the groups of all optimizers in a chain. Megatron does not save which parameters belong to each group."""
    if not isinstance(optimizer, dict):
        return
    for key, inner in optimizer.items():
        if key == "param_groups" and isinstance(inner, list):
            for group in (group for group in inner if isinstance(group, dict)):
                step = group.get("step")
                whole = {"step": int(step)} if isinstance(step, float) and step.is_integer() else {}
                yield {name: value for name, value in group.items() if name != "params"} | whole
        elif key != "state":
            yield from _megatron_groups(inner)


def _steps(optimizer: Any) -> set[float]:
    """Return the different step counts that groups and optimizers contain."""
    if isinstance(optimizer, list):
        return {step for inner in optimizer for step in _steps(inner)}
    if not isinstance(optimizer, dict):
        return set()
    found = {step for inner in optimizer.values() for step in _steps(inner)}
    for step in (optimizer.get("common_step"), optimizer.get("step")):
        if isinstance(step, Held) and math.prod(step.shape) == 1 and step.dtype == "float32":
            found.add(float(step.content().view(np.float32)[0]))
        elif isinstance(step, (int, float)):
            found.add(float(step))
    return found


def _counters(common: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    args = getattr(common.get("args"), "state", None)
    kept = {name: args[name] for name in _COUNTERS if isinstance(args, dict) and type(args.get(name)) is int}
    flops = common.get("num_floating_point_operations_so_far")
    return (
        kept
        | ({} if step is None else {"iteration": step})
        | ({"num_floating_point_operations_so_far": flops} if flops else {})
    )
