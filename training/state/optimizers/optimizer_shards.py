"""The position of each tensor of an optimizer: the position of its parameter, and which of the parameter's elements the tensor contains.

The distributed optimizer's own map tells how flat shards cut the parameters. The identity of tensors tells to which parameter a shard
belongs. The position in a group is never used for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from ....checkpoint.format.sharding import OUTDATED, Part, scalars, within
from .optimizers import Optimizers, parameters_of

_SHARDS = "shard_fp32_from_float16_groups"
"""An attribute that only Megatron's distributed optimizer has."""


def owned_parts(source: Optimizers, places: Mapping[int, list[Part]]) -> dict[tuple[str, str], list[Part]]:
    """Return the parts (boxes in a global tensor) that each of the optimizer's own parameters copies or shards. Each key is a pair: which
    optimizer of a chain, and "group.position". From these parts, `state_parts` derives the position of any state, including a state that a
    fresh optimizer doesn't have yet.

    places: the parts of the model's parameters, by id.
    """
    found: dict[tuple[str, str], list[Part]] = {}
    for index, wrapper, inner in source.parts():
        owners = _owners(wrapper, inner, whole=_is_layer_wise(source))
        for key, parameter in parameters_of(inner):
            found[index, key] = owners[id(parameter)].parts(places)
    return found


def before_gather(sources: Iterable[Optimizers]) -> Callable[[torch.Tensor, Sequence[Part]], list[Part]]:
    """Return a function of a parameter and its parts that returns them divided, if the next forward pass gathers the parameters from the
    data-parallel ranks (Megatron's `--overlap-param-gather`). Until then, only the elements that this rank's optimizer steps are present.
    The others are those of the step before, so they become outdated replicas of the parts of the ranks that step them."""
    wrapped = [(wrapper, inner, _is_layer_wise(source)) for source in sources for _, wrapper, inner in source.parts()]
    owners = (owner for wrapper, inner, whole in wrapped for owner in _owners(wrapper, inner, whole=whole).values())
    steps = {id(owner.parameter): owner for owner in owners if owner.instance is not None}
    sharded = any(whole or hasattr(wrapper, _SHARDS) for wrapper, _, whole in wrapped)

    def divided(parameter: torch.Tensor, parts: Sequence[Part]) -> list[Part]:
        if not (sharded and parameter.requires_grad and parameter.numel()):
            return [*parts]
        owner, end = steps.get(id(parameter)), parameter.numel()
        first, last = (owner.span or (0, end)) if owner else (0, 0)
        found = []
        for part in parts:
            for own, start, stop in ((False, 0, first), (True, first, last), (False, last, end)):
                number = (owner.instance or 0) if own and owner else OUTDATED
                found += [
                    replace(each, start=start + each.start, replica=(*part.replica[:-1], number))
                    for each in within(part, start, stop)
                ]
        return found

    return divided


def _is_layer_wise(source: Optimizers) -> bool:
    return type(source.thing).__name__ == "LayerWiseDistributedOptimizer"


def state_parts(prefix: str, state: str, parts: Iterable[Part], *, alike: bool) -> list[Part]:
    """Return the positions of one state of a parameter that has the given parts. alike: the state has the parameter's shape; a state
    without that shape is one number."""
    held = parts if alike else scalars(parts)
    return [replace(part, name=f"{prefix}/{state}/{part.name}") for part in held]


@dataclass(frozen=True)
class _Owner:
    """The model's parameter to which an optimizer's parameter belongs, and which elements of it the optimizer's parameter contains."""

    parameter: torch.Tensor
    span: tuple[int, int] | None = None
    """The range of elements in the flattened parameter; None for all elements."""
    instance: int | None = None
    """The replica number of the parameter, if the data-parallel ranks own different parameters instead of copies; otherwise None."""

    def parts(self, places: Mapping[int, list[Part]]) -> list[Part]:
        parts = places.get(id(self.parameter), [])
        if self.span is not None:
            parts = [shard for part in parts for shard in within(part, *self.span)]
        if self.instance is not None:  # Megatron's axes of replicas are pipeline, tensor, data
            parts = [replace(part, replica=(*part.replica[:-1], self.instance)) for part in parts]
        return parts


def _owners(wrapper: Any, inner: torch.optim.Optimizer, *, whole: bool) -> dict[int, _Owner]:
    """Return the owners, by the id of the optimizer's parameter. whole: each rank of a data-parallel group owns whole parameters."""
    instance = 0 if whole else None
    found = {id(parameter): _Owner(parameter, None, instance) for _, parameter in parameters_of(inner)}
    if hasattr(wrapper, _SHARDS):
        instance = getattr(wrapper, "distributed_optimizer_instance_id", 0)
        for models, shards in _shards(wrapper):
            for model, shard in zip(models, shards, strict=True):
                if shard is not None:
                    span = wrapper._get_model_param_range_map(model)["param"]
                    found[id(shard)] = _Owner(model, (span.start, span.end), instance)
    elif hasattr(wrapper, "fp32_from_float16_groups"):
        for models, mains in zip(wrapper.float16_groups, wrapper.fp32_from_float16_groups, strict=True):
            found.update((id(main), _Owner(model, None, instance)) for model, main in zip(models, mains, strict=True))
    return found


def _shards(wrapper: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Yield the model's parameters and the optimizer's own, group by group. `model_param_group_index_map` can't be used: its positions are
    wrong in a group with parameters of two dtypes (megatron-core 0.16.1, distrib_optimizer.py:297 against :441)."""
    yield from zip(wrapper.model_fp32_groups, wrapper.shard_fp32_groups, strict=True)
    yield from zip(wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups, strict=True)
    yield from zip(wrapper.model_float16_groups, wrapper.shard_float16_groups, strict=True)
