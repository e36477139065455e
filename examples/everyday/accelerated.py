"""Hugging Face Accelerate, with gradient accumulation: torchrun --nproc-per-node 2 accelerated.py"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from common import arguments, batch, finish, network
from torch import nn

from mt_resilient import Session

ACCUMULATED = 2


def main() -> None:
    args = arguments()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATED)
    set_seed(1234)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * args.steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in session.steps(args.steps):
        for part in range(ACCUMULATED):
            inputs, targets = batch(session.data_step * ACCUMULATED + part, accelerator.device)
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        session.report(loss=loss, grad_norm=grad_norm)
        accelerator.print(f"step {step} loss {loss.item()!r}", flush=True)

    finish(model, optimizer)


if __name__ == "__main__":
    main()
