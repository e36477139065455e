"""Megatron's HybridDeviceOptimizer (`--optimizer-cpu-offload`) steps its parameters through further optimizers, on copies on the CPU or in
fp32. After each step, its own state contains the states of these optimizers. A restore fills that state and the parameters. The copies must
then be made from them, as Megatron's own load does; otherwise the next step would write the copies' values into the parameters.
"""

from __future__ import annotations

from typing import Any

import torch

_COPY = "master_param"
"""The name in a parameter's state of the copy that is stepped."""


def stepped_copy(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return the copy that is stepped in place of the parameter; the parameter itself, if the optimizer has no copies."""
    copies = getattr(optimizer, "param_to_inner_param", {})
    return copies.get(parameter, parameter)


def renew_copies(optimizer: Any) -> None:
    """Make the copies, and the optimizers that step them, from the restored parameters and state."""
    if not hasattr(optimizer, "inner_param_to_orig_param"):
        return
    optimizer._init_sub_optimizers()
    for inner in optimizer.sub_optimizers:
        for copied in (each for group in inner.param_groups for each in group["params"]):
            state = optimizer.state.get(optimizer.inner_param_to_orig_param[copied])
            if not state:
                continue
            for key, value in state.items():
                if torch.is_tensor(value) and value.shape == copied.shape:
                    state[key] = value.to(copied.device)
            if _COPY in state:
                copied.data.copy_(state[_COPY])
                state[_COPY] = copied
            inner.state[copied] = state
