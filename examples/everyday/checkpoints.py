"""A script that saves and resumes from its own checkpoints: torchrun --nproc-per-node 2 checkpoints.py"""

import os

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mt_resilient import Session


def main() -> None:
    args = arguments()
    device = begin()
    model = DistributedDataParallel(network(dropout=0.0).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    latest, start = os.path.join(args.folder, "latest.pt"), 0
    if os.path.exists(latest):
        saved = torch.load(latest, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]

    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps, start=start):
        inputs, targets = batch(session.data_step, device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(loss=loss)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
            if (step + 1) % 10 == 0:
                with session.pausing("checkpoint"):
                    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(saved, latest + ".new")
                    os.replace(latest + ".new", latest)

    finish(model, optimizer)


if __name__ == "__main__":
    main()
