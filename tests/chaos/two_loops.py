"""Trains in two loops, each with a Session of its own: torchrun --nproc-per-node 2 two_loops.py. The second one prints its steps."""

import sys
from pathlib import Path

import torch
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "everyday"))
from common import arguments, batch, begin, finish, network

from mt_resilient import Session

args = arguments()
device = begin()
model = nn.parallel.DistributedDataParallel(network().to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(session: Session, first: int) -> None:
    for step in session.steps(args.steps // 2):
        inputs, targets = batch(first + step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        if first and distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)


train(Session(model=model, optimizer=optimizer), 0)
train(Session(model=model, optimizer=optimizer), args.steps // 2)
finish(model, optimizer)
