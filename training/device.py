"""musa, cuda and cpu behind the same verbs. Asks the tensors, never `torch.cuda`: Moore Threads' patches map one to the other, and
there `is_available` and `current_device` no longer say what they mean."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/mtgpu", "/dev/musa")


def synchronize(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until everything queued on the devices of `tensors` is done."""
    for kind in {tensor.device.type for tensor in tensors} - {"cpu", "meta"}:
        getattr(torch, kind).synchronize()


def rng_states(kinds: Iterable[str]) -> dict[str, torch.Tensor]:
    """The generator state of the current device of each kind among `kinds`, as uint8 tensors on the CPU."""
    return {kind: getattr(torch, kind).get_rng_state() for kind in sorted(set(kinds) - {"cpu", "meta"})}


def set_rng_states(states: dict[str, torch.Tensor]) -> None:
    for kind, state in states.items():
        getattr(torch, kind).set_rng_state(state)


def touched() -> str:
    """The accelerator's device file that this process holds open, empty when it holds none. It stays right under patches of
    `torch.cuda`, and a process that has one must not fork: its children inherit a context that they cannot use."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(DRIVER_FILES) or target.startswith("/dev/nvidia"):
            return target
    return ""
