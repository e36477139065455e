"""Two ranks with a thing in their state that takes back what it gave for a while, and then raises: WHERE says in which processes.

At step POISON the gradient of rank 1 is NaN, once: MARKER is there then. A step that is made from a state that is half restored is told.
"""

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from mt_resilient import Session

ENOUGH = 3
"""So many steps are taken back; of the first snapshot this is proved."""


class Thing:
    refuses = False

    def __init__(self) -> None:
        self.steps = 0

    def take(self, state: dict[str, Any]) -> None:
        if self.refuses and state["steps"] > ENOUGH:
            raise ValueError(f"{state['steps']} steps are too many")
        self.steps = state["steps"]


class Stateful(Thing):
    """It knows how it is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.take(state)


class Plain(Thing):
    """Python's own way."""

    def __getstate__(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.take(state)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--where", choices=["nowhere", "everywhere", "rank 1", "in place"], default="nowhere")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--marker", type=Path)
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    rank = distributed.get_rank()
    network = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    refuses = {"nowhere": False, "everywhere": True, "rank 1": rank == 1, "in place": False}[args.where]
    thing = Plain() if args.plain else Stateful()
    Thing.refuses = refuses
    session = Session(network=network, thing={"it": thing} if args.plain else thing, optimizer=optimizer)
    for step in session.steps(args.steps):
        time.sleep(args.step_delay)
        assert thing.steps == step, f"half restored: {thing.steps} and {step}"
        thing.steps += 1
        Thing.refuses = refuses or args.where == "in place"
        inputs = torch.randn(8, 8, generator=torch.Generator().manual_seed(session.data_step * 2 + rank))
        loss = (network(inputs) - inputs.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == args.poison and rank == 1 and not args.marker.exists():
            args.marker.touch()
            network.module.weight.grad.fill_(torch.nan)
        optimizer.step()
        session.report(loss=loss.item())
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    content = b"".join(t.numpy().tobytes() for t in network.state_dict().values())
    if rank == 0:
        print("final state sha256", hashlib.sha256(content).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)  # as in examples/minimal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
