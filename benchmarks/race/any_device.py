"""A state for the checkpoint manager of nvidia-resiliency-ext that may have tensors on any device. Theirs takes only tensors on CUDA
devices, which the states of random generators are not. It is pickled, so it has a module of its own."""

from __future__ import annotations

from typing import Any

from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class OnAnyDevice(BasicTensorAwareStateDict):
    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict, self._is_hollow = state_dict, False

    def restore_tensor_device(self, non_blocking: bool = True) -> None: ...
