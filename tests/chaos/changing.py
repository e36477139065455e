"""Two ranks whose state is more than parameters and moments, and changes its form on the way.

There are masks of -inf, complex numbers under DistributedDataParallel, float64 beside bfloat16, extra state of a module, an optimizer
around another one, and a learning rate of numpy's. At step 12 a head is unfrozen, which gets a group of its own; a buffer grows, another
one comes, and a third goes. At step POISON the gradient of rank 1 is NaN, once: MARKER is there then.
"""

import argparse
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import distributed, nn

from mt_resilient import Session

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from peoples_optimizers import Lookahead

CHANGE = 12


class Turning(nn.Module):
    """Of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.complex64) @ self.weight).abs()


class Scaled(nn.Module):
    """Counts its calls, and divides by their number: extra state, of which neither parameters nor buffers know."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.calls], dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return inputs / (1 + 0.01 * self.calls)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        self.register_buffer("memory", torch.zeros(1, 8))
        self.register_buffer("later", None)
        self.register_buffer("early", torch.ones(8))
        self.body, self.scaled = nn.Linear(8, 8), Scaled()
        self.wide, self.narrow = nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16()
        self.head = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = (self.mask + self.body.weight).softmax(1) @ self.body(inputs).T
        hidden = self.narrow(self.wide(self.scaled(hidden.T).double()).bfloat16()).float()
        hidden = hidden * (1 if self.early is None else self.early) + self.memory.mean(0)
        return self.head(hidden) + (0 if self.later is None else self.later)

    def change(self) -> None:
        self.head.requires_grad_(True)
        self.memory = torch.full((3, 8), 0.5)
        self.later = torch.full((8,), 0.25)
        self.early = None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--marker", type=Path)
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    rank, network = distributed.get_rank(), Network()
    turning = nn.parallel.DistributedDataParallel(Turning())
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = Lookahead(torch.optim.AdamW([*trained, *turning.parameters()], lr=np.float64(0.01)))
    session = Session(network=network, turning=turning, optimizer=optimizer)
    for step in session.steps(args.steps):
        time.sleep(args.step_delay)
        if step == CHANGE:
            network.change()
            optimizer.optimizer.add_param_group({"params": [*network.head.parameters()], "counter": 0})
        seed = session.data_step * 2 + rank
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
        loss = (network(turning(inputs)) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in network.parameters():
            if parameter.grad is not None:
                distributed.all_reduce(parameter.grad)
        if step == args.poison and rank == 1 and not args.marker.exists():
            args.marker.touch()
            network.body.weight.grad.fill_(torch.nan)
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * np.float64(0.99)
        session.report(loss=loss.item())
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    groups = [{k: repr(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    tensors = [*network.state_dict().values(), *turning.state_dict().values()]
    tensors += [v for state in optimizer.optimizer.state.values() for v in state.values()]
    content = b"".join(torch.view_as_real(t).numpy().tobytes() if t.is_complex() else bytes_of(t) for t in tensors)
    if rank == 0:
        print("final state sha256", hashlib.sha256(content + repr(groups).encode()).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)  # as in examples/minimal
    distributed.destroy_process_group()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    main()
