"""A training with a state that its Session is not given, a global counter: torchrun --nproc-per-node 2 forgets.py --steps N --nan-at K

Each step computes with the counter, so steps that are computed again give another loss. --nan-at: the loss of that step is NaN, once.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import distributed, nn

from mt_resilient import Session

calls = 0


def main() -> None:
    global calls
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--nan-at", type=int, default=-1)
    parser.add_argument("--mark", type=Path, required=True)
    parser.add_argument("--step-delay", type=float, default=0.05)
    args = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps):
        calls += 1
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(session.data_step))
        loss = (model(inputs) - inputs).square().mean() * (1 + calls / 1000)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_delay)
        wrong = step == args.nan_at and not args.mark.exists()
        distributed.barrier()
        args.mark.touch() if wrong else None
        session.report(loss=float("nan") if wrong else loss)


if __name__ == "__main__":
    main()
