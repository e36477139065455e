"""Rank 0 evaluates every ten steps while the other ranks wait: torchrun --nproc-per-node 2 evaluation.py"""

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mt_resilient import Session


@torch.no_grad()
def evaluate(model: nn.Module, device: torch.device) -> float:
    model.eval()
    losses = [nn.functional.mse_loss(model(x), y) for x, y in (batch(-number, device) for number in range(1, 9))]
    model.train()
    return torch.stack(losses).mean().item()


def main() -> None:
    args = arguments()
    device = begin()
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    best = {"loss": float("inf"), "step": -1}

    session = Session(model=model, optimizer=optimizer, best=best)
    for step in session.steps(args.steps):
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        if step % 10 == 9:
            with session.pausing("evaluation"):
                if distributed.get_rank() == 0:
                    found = evaluate(model.module, device)
                    if found < best["loss"]:
                        best.update(loss=found, step=step)
                    print(f"step {step} evaluated {found!r} best {best}", flush=True)
                distributed.barrier()

    finish(model, optimizer)


if __name__ == "__main__":
    main()
