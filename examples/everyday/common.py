"""Code that the scripts in this folder share: a small task whose batches depend only on a number, and a SHA-256 of the trained state."""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
from torch import distributed, nn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default=".", help="where the script writes what it keeps: curves, checkpoints")
    return parser.parse_args()


def begin() -> torch.device:
    """Create the process group, seed every rank alike, and return this rank's device."""
    device = pick_device()
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(1234)
    return device


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def network(dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 1))


def batch(number: int, device: torch.device | str, samples: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of this rank's share of a batch. The same number gives the same batch."""
    seed = number * distributed.get_world_size() + distributed.get_rank()
    inputs = torch.randn(samples, 16, generator=torch.Generator().manual_seed(seed))
    return inputs.to(device), inputs.sin().sum(1, keepdim=True).to(device)


def finish(*trained: nn.Module | torch.optim.Optimizer) -> None:
    """Print one SHA-256 over weights, buffers and optimizer state of all ranks. Then leave the process group."""
    mine = hashlib.sha256()
    for thing in trained:
        states = [thing.state_dict()] if isinstance(thing, nn.Module) else thing.state.values()
        for tensor in (value for state in states for value in state.values() if torch.is_tensor(value)):
            here = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            mine.update(here.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    digests = [""] * distributed.get_world_size()
    distributed.all_gather_object(digests, mine.hexdigest())
    if distributed.get_rank() == 0:
        print("final state sha256", hashlib.sha256("".join(digests).encode()).hexdigest(), flush=True)
    time.sleep(0.2)  # gloo's threads still end the last collective, and destroying its group now may hang (torch 2.13)
    distributed.destroy_process_group()
