"""Patches for code in Megatron that relies on NCCL and for which gloo behaves differently."""

from __future__ import annotations

import atexit
import functools
from typing import Any

import after_import

PATCHES: list[after_import.Change] = []
patch = after_import.into(PATCHES)


@patch
def uneven_collectives(torch: Any) -> None:
    """Support lists of unequal sizes (MoE with TP > 1: tokens per expert), which NCCL accepts and gloo does not."""
    from torch.distributed import distributed_c10d as c10d

    gather, scatter = c10d.all_gather, c10d.reduce_scatter

    @functools.wraps(gather)
    def all_gather(outputs: list[Any], tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, tensor, group=group, async_op=async_op)
        padded = torch.zeros(max(len(output) for output in outputs), *tensor.shape[1:], dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        pieces = [torch.empty_like(padded) for _ in outputs]
        gather(pieces, padded, group=group)
        for output, piece in zip(outputs, pieces, strict=True):
            output.copy_(piece[: len(output)])
        return None

    @functools.wraps(scatter)
    def reduce_scatter(
        output: Any, inputs: list[Any], op: Any = c10d.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({piece.shape for piece in inputs}) == 1:
            return scatter(output, inputs, op=op, group=group, async_op=async_op)
        whole = torch.cat([piece.contiguous() for piece in inputs])
        c10d.all_reduce(whole, op=op, group=group)
        start = sum(len(piece) for piece in inputs[: c10d.get_rank(group)])
        output.copy_(whole[start : start + len(output)])
        return None

    for function in (all_gather, reduce_scatter):
        setattr(c10d, function.__name__, function)
        setattr(torch.distributed, function.__name__, function)


@patch
def isend_owns_buffer(torch: Any) -> None:
    """Let isend send a copy. The interleaved pipeline frees an activation while isend still reads it: NCCL's allocator makes this harmless,
    but gloo sends NaN."""
    from torch.distributed import distributed_c10d as c10d

    isend = c10d.isend

    @functools.wraps(isend)
    def sent(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.detach().clone(), *args, **kwargs)

    torch.distributed.isend = c10d.isend = sent


@patch
def groups_end_with_the_process(torch: Any) -> None:
    """Close groups at the process's end. Megatron ≥ 0.17 leaves them open, and gloo's threads then sometimes abort a good run at exit
    (SIGABRT)."""
    from torch.distributed import distributed_c10d as c10d

    atexit.register(lambda: c10d.is_initialized() and c10d.destroy_process_group())
