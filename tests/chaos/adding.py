"""Two ranks, each with data of its own, that add up gradients over several steps of the session: --kind no_sync, views (gradients are
views of DistributedDataParallel's buckets), unused (a layer is left out of most passes) or fsdp (without its synchronization). Or that
average their weights now and then: --kind averaging (PostLocalSGDOptimizer). The data come from a StatefulDataLoader that the Session is
given, and that is being iterated.

At step POISON the loss of rank 1 is NaN, once: MARKER is there then.
"""

import argparse
import hashlib
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from mt_resilient import Session

EVERY = 4
"""Steps of the session until the optimizer's."""


class Network(nn.Module):
    def __init__(self, left_out: bool) -> None:
        super().__init__()
        self.body, self.head, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.left_out = left_out

    def forward(self, inputs: torch.Tensor, first: bool) -> torch.Tensor:
        hidden = self.body(inputs).tanh()
        return self.head(self.middle(hidden) if first or not self.left_out else hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-delay", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--kind", choices=["no_sync", "views", "unused", "fsdp", "averaging"], default="no_sync")
    parser.add_argument("--poison", type=int, default=-1)
    parser.add_argument("--marker", type=Path)
    args = parser.parse_args()

    distributed.init_process_group("gloo")
    torch.manual_seed(1234)
    rank = distributed.get_rank()
    network: Any = Network(left_out=args.kind == "unused")
    if args.kind == "fsdp":
        fully_shard(network, mesh=init_device_mesh("cpu", (2,)))
    optimizer: Any = torch.optim.AdamW(network.parameters(), lr=0.01)
    if args.kind == "averaging":
        optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=PeriodicModelAverager(period=EVERY, warmup_steps=2))
    elif args.kind != "fsdp":
        views, unused = args.kind == "views", args.kind == "unused"
        network = DistributedDataParallel(network, gradient_as_bucket_view=views, find_unused_parameters=unused)
    samples = torch.randn(1000, 8, generator=torch.Generator().manual_seed(rank))
    loader = StatefulDataLoader(samples, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank))
    session = Session(network=network, optimizer=optimizer, loader=loader)
    steps = session.steps(args.steps)
    for step, inputs in zip(steps, loader, strict=False):
        time.sleep(args.step_delay)
        takes = args.kind == "averaging" or step % EVERY == EVERY - 1
        if args.kind == "fsdp":
            network.set_requires_gradient_sync(takes)
        with nullcontext() if takes or args.kind == "fsdp" else network.no_sync():
            loss = (network(inputs, step % EVERY == 0) - inputs.sin()).square().mean()
            loss.backward()
        if takes:
            optimizer.step()
            optimizer.zero_grad()
        told = loss.item()
        if step == args.poison and rank == 1 and not args.marker.exists():
            args.marker.touch()
            told = float("nan")
        session.report(loss=told)
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    parts = (getattr(parameter, "to_local", lambda whole=parameter: whole)() for parameter in network.parameters())
    content = b"".join(part.detach().numpy().tobytes() for part in parts)
    digests: list[str] = [""] * 2
    distributed.all_gather_object(digests, hashlib.sha256(content).hexdigest())
    if rank == 0:
        print("final state sha256", hashlib.sha256("".join(digests).encode()).hexdigest(), flush=True)
    distributed.barrier()
    time.sleep(0.2)  # as in examples/minimal
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
