"""Two ranks whose modules change on the way, as no restart could make them: at step CHANGE the head of rank 1, or of both, becomes another
one, with an optimizer's group for it.

At step POISON the gradient of rank 1 is NaN, once: MARKER is there then. With --lazy a layer is made in the first forward pass.
"""

import argparse
import hashlib
import time
from pathlib import Path

import torch
from torch import distributed, nn

from mt_resilient import Session


class Network(nn.Module):
    def __init__(self, lazy: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lazy = lazy

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.lazy and not hasattr(self, "middle"):
            torch.manual_seed(7)
            self.middle = nn.Linear(8, 8).requires_grad_(False)
        hidden = self.body(inputs)
        return self.head(self.middle(hidden) if self.lazy else hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--change", type=int, default=12)
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--marker", type=Path)
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    rank = distributed.get_rank()
    network = Network(args.lazy)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    session = Session(network=network, optimizer=optimizer)
    for step in session.steps(args.steps):
        time.sleep(args.step_delay)
        if step == args.change and rank == 1:  # as on one stage of a pipeline
            torch.manual_seed(9)
            network.head = nn.Sequential(network.head, nn.Tanh(), nn.Linear(8, 8))
            optimizer.add_param_group({"params": network.head[2].parameters()})
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(session.data_step * 2 + rank))
        loss = (network(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in network.body.parameters():
            distributed.all_reduce(parameter.grad)
        if step == args.poison and rank == 1 and not args.marker.exists():
            args.marker.touch()
            network.body.weight.grad.fill_(torch.nan)
        optimizer.step()
        session.report(loss=loss.item())
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    state = [value for entry in optimizer.state.values() for value in entry.values()]
    content = b"".join(t.detach().numpy().tobytes() for t in (*network.parameters(), *state))
    digests: list[str] = [""] * 2
    distributed.all_gather_object(digests, hashlib.sha256(content).hexdigest())
    if rank == 0:
        print("final state sha256", hashlib.sha256("".join(digests).encode()).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)  # as in examples/minimal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
