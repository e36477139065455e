"""FSDP2's groups of parameters. A forward pass gathers the parameters of a group. The backward pass shards them again.

A forward pass without a backward pass, such as an evaluation, may leave a group gathered. The modules then have whole parameters, whose
storage FSDP2 frees at will, in place of the shards that the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Module


def by_fsdp(modules: Iterable[Module]) -> list[Any]:
    """Return the modules to which `fully_shard` was applied."""
    return [module for module in modules if hasattr(type(module), "_get_fsdp_state")]


def groups(module: Any) -> list[Any]:
    """Return the parameter groups of a module to which `fully_shard` was applied. A module has at most one in torch before 2.13."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [*filter(None, (getattr(state, "_fsdp_param_group", None),))] if found is None else [*found]


def shard_again(modules: Iterable[Any]) -> bool:
    """Shard each group that is gathered, as torch does before it saves a `state_dict`. Return whether there was one. No value changes:
    the next forward pass gathers the parameters again."""
    gathered = [module for module in modules if any(not getattr(g, "is_sharded", True) for g in groups(module))]
    for module in gathered:
        module.reshard()
    return bool(gathered)
