"""torch.compile inside DistributedDataParallel: torchrun --nproc-per-node 2 compiled.py"""

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mt_resilient import Session


def main() -> None:
    args = arguments()
    device = begin()
    model = DistributedDataParallel(torch.compile(network().to(device)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(args.steps):
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        session.report(loss=loss, grad_norm=grad_norm)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)

    finish(model, optimizer)


if __name__ == "__main__":
    main()
