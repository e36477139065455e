"""Gathers the parameters of Megatron's data-parallel ranks after a restore.

With `--overlap-param-gather`, an optimizer's step changes the parameters only on the ranks that step them. The next forward pass gathers
them. A snapshot between the two has the old values on the other ranks, and the loop does not gather on its first step. So the parameters
are gathered here. They are gathered without that option too, because the snapshot may come from a run with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def finish_gathers(chunks: Iterable[Any]) -> None:
    """Wait for gathers that have begun. With `--overlap-param-gather-with-optimizer-step`, some begin before a boundary. On a device, only
    the stream waits."""
    for group in _groups(chunks):
        if (handle := getattr(group, "param_gather_handle", None)) is not None:
            handle.wait()


def gather_parameters(chunks: Iterable[Any], optimizer: Any) -> None:
    """Gather the parameters from the ranks that step them, right after a restore. Collective."""
    chunks = list(chunks)
    finish_gathers(chunks)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    with torch.no_grad():
        if hasattr(optimizer, "allgather_params"):  # LayerWiseDistributedOptimizer: each rank steps whole parameters
            optimizer.allgather_params()
        if any(getattr(_config(chunk), "use_megatron_fsdp", False) for chunk in chunks):
            for part in parts:
                part._copy_main_params_to_model_params()
        if any(getattr(_config(chunk), "reuse_grad_buf_for_mxfp8_param_ag", False) for chunk in chunks):
            for part in parts:
                if hasattr(part, "_copy_main_params_to_param_buffer"):
                    part._copy_main_params_to_param_buffer()
        for chunk in chunks:
            overlapped = getattr(_config(chunk), "overlap_param_gather", False)
            if getattr(_config(chunk), "use_distributed_optimizer", False):
                _gather(chunk, overlapped=overlapped)
            if overlapped and not getattr(chunk, "remove_forward_pre_hook_handles", True):
                chunk.enable_forward_pre_hook()


def _gather(chunk: Any, *, overlapped: bool) -> None:
    for group in _groups([chunk]):
        group.param_gather_handle = None
    chunk.start_param_sync(force_dispatch=True)
    for group in _groups([chunk]) if overlapped else ():
        group.finish_param_sync(skip_next_bucket_dispatch=True)


def _config(chunk: Any) -> Any:
    return getattr(chunk, "ddp_config", None)


def _groups(chunks: Iterable[Any]) -> Iterator[Any]:
    """Yield the chunks' groups of buckets."""
    for chunk in chunks:
        yield from getattr(chunk, "bucket_groups", ())
        yield from getattr(chunk, "expert_parallel_bucket_groups", ())
