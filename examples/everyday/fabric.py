"""Lightning Fabric: torchrun --nproc-per-node 2 fabric.py"""

import os

import torch
from common import arguments, batch, finish, network
from lightning.fabric import Fabric
from torch import nn

from mt_resilient import Session


def main() -> None:
    args = arguments()
    fabric = Fabric(devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(1234)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(args.steps):
        inputs, targets = batch(session.data_step, fabric.device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        fabric.backward(loss)
        grad_norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        session.report(loss=loss, grad_norm=grad_norm)
        fabric.print(f"step {step} loss {loss.item()!r}", flush=True)

    finish(model, optimizer)


if __name__ == "__main__":
    main()
