"""What a rank has called in its process groups: a summary of torch's flight recorder, which records each collective."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GroupCalls:
    """The calls of one rank in one process group."""

    group: str
    """The group's name, which is the same on all its ranks."""
    about: str = ""
    """What the script, or torch, calls the group."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """The group's ranks, if a collective is open there, as arguments of `range`; empty: not known."""
    last: int
    """Number of the last collective that the rank has called, from 1; 0: it has called none."""
    open: int = 0
    """Number of the first collective that the rank has called and that is not complete; 0: there is none."""
    call: str = ""
    """What the open collective does, such as `all_reduce of 1024 Float`."""
    started: bool | None = None
    """Whether the device has begun the open collective; None: the recorder does not measure this (`TORCH_NCCL_ENABLE_TIMING`)."""
