"""Gradients accumulated over micro-batches, in mixed precision with a loss scaler: torchrun --nproc-per-node 2 accumulation.py"""

from contextlib import nullcontext

import torch
from common import arguments, batch, begin, finish, network
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mt_resilient import Session

MICRO_BATCHES = 4


def main() -> None:
    args = arguments()
    device = begin()
    model = DistributedDataParallel(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=7)

    session = Session(model=model, optimizer=optimizer, scaler=scaler)
    for step in session.steps(args.steps):
        total = torch.zeros((), device=device)
        for part in range(MICRO_BATCHES):
            inputs, targets = batch(session.data_step * MICRO_BATCHES + part, device, samples=8)
            with model.no_sync() if part < MICRO_BATCHES - 1 else nullcontext():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = nn.functional.mse_loss(model(inputs).float(), targets) / MICRO_BATCHES
                scaler.scale(loss).backward()
                total += loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        session.report(loss=total, grad_norm=grad_norm, skipped=scaler.get_scale() < before)
        if distributed.get_rank() == 0:
            print(f"step {step} loss {total.item()!r} scale {scaler.get_scale()}", flush=True)

    finish(model, optimizer)


if __name__ == "__main__":
    main()
