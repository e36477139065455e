"""A state for the checkpoint manager of nvidia-resiliency-ext that may have tensors on any device. Theirs takes only tensors on CUDA
devices, which the states of random generators are not. Theirs also puts the copies into the dictionaries that it was given, and the
optimizer goes on with some of these; and `LocalCheckpointManager.save` writes the copies without waiting for them. It is pickled, so it has
a module of its own."""

from __future__ import annotations

from typing import Any

import torch
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict
from torch.utils import _pytree


class OnAnyDevice(BasicTensorAwareStateDict):
    def __init__(self, state_dict: dict[str, Any]) -> None:
        self.state_dict, self._is_hollow = state_dict, False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.state_dict = _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, self.state_dict)

    def restore_tensor_device(self, non_blocking: bool = True) -> None: ...
