"""Curves for TensorBoard, without the points that a recovery computes again: torchrun --nproc-per-node 2 curves.py"""

import os

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from mt_resilient import Session


def main() -> None:
    args = arguments()
    device = begin()
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curves = os.path.join(args.folder, "curves")
    writer, expected = None, -1

    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps):
        if distributed.get_rank() == 0 and step != expected:  # the first step, or a step that is computed again
            writer = SummaryWriter(curves, purge_step=step, flush_secs=5)
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        if writer is not None:
            writer.add_scalar("loss", loss, step)
            writer.flush()  # a killed rank loses the points that it has not flushed
            print(f"step {step} loss {loss.item()!r}", flush=True)
        expected = step + 1

    finish(model, optimizer)


if __name__ == "__main__":
    main()
