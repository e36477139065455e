"""An ordinary training on devices that several ranks may share, for campaigns: bfloat16, dropout on the device, a loader, a schedule.

    torchrun --nproc-per-node 2 ordinary.py [--steps N] [--epochs N] [--step-delay SECONDS]

NCCL takes each device for one rank only, so ranks that share a device use gloo. Without a device it trains on the CPU. Prints the loss
of each step, and a SHA-256 of parameters and optimizer state at the end.
"""

import argparse
import hashlib
import os
import time

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mt_resilient import Session

WIDTH, BATCH = 256, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-delay", type=float, default=0.02)
    options = parser.parse_args()
    rank, world, devices = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % devices) if devices else torch.device("cpu")
    if devices:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if devices >= world else "gloo")
    torch.manual_seed(7)
    layers = [
        part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1))
    ]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=bool(devices))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    each = options.steps // options.epochs
    inputs = torch.randn(each * BATCH * world, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sin().mean(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler, pin_memory=bool(devices))
    session = Session(model=model, optimizer=optimizer, scheduler=schedule)
    for step, (given, wanted) in session.batches(loader, epochs=options.epochs):
        time.sleep(options.step_delay)
        given, wanted = given.to(device, non_blocking=True), wanted.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(model(given).float(), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        session.report(loss=loss)
        if rank == 0:
            print(f"step {step} loss {loss.item()!r}", flush=True)
    state = [*model.state_dict().values(), *(value for entry in optimizer.state.values() for value in entry.values())]
    if rank == 0:
        print(
            "sha256", hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in state)).hexdigest(), flush=True
        )
    distributed.barrier()
    time.sleep(0.2)  # gloo's threads still end the last collective (torch 2.13)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
