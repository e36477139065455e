"""A loop of one's own on a MUSA device, with the stand-in for torch_musa: dropout on the device, gradients added up over ADDED steps and
averaged over the ranks. With EVALUATES_S, it only computes the loss, and its fourth step takes so much longer. With ENDLESS, a
kernel on rank 1 never ends, once. With HOLDS, it waits at that step for the file GATE, and says how much memory waits for its Session."""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch_musa  # noqa: F401  (brings torch.musa)
from torch import distributed, nn

from mt_resilient import Session
from mt_resilient.training.snapshot import early_memory

steps, marker = int(sys.argv[1]), Path(sys.argv[2])
ADDED, evaluates_s = 3, float(os.environ.get("EVALUATES_S", "0"))
distributed.init_process_group("mccl")
rank, world = distributed.get_rank(), distributed.get_world_size()
device = torch.device("musa", 0)
torch.musa.set_device(device)
torch.manual_seed(rank)  # dropout differs from rank to rank
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
for parameter in model.parameters():
    distributed.broadcast(parameter.detach(), 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)

if "HOLDS" in os.environ:
    # In one piece, because both ranks write to one pipe.
    print(f"rank {rank} finds {len(early_memory._pinned)} slots prepared\n", end="", flush=True)
session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
for step in session.steps(steps):
    time.sleep(0.01 + (evaluates_s if step == 3 else 0))
    while str(step) == os.environ.get("HOLDS") and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.02)
    generator = torch.Generator().manual_seed(step * world + rank)
    inputs = torch.randn(32, 16, generator=generator)
    loss = nn.functional.mse_loss(model(inputs.to(device)), inputs.sin().sum(1, keepdim=True).to(device))
    if step % ADDED == 0:
        optimizer.zero_grad()
    if not evaluates_s:
        loss.backward()
    if step == 11 and rank == 1 and "POISON" in os.environ and not marker.exists():
        marker.touch()
        model[0].weight.grad[0, 0] = float("nan")
    if step == 11 and rank == 1 and not marker.exists() and "ENDLESS" in os.environ:
        marker.touch()
        torch.musa._sleep(10**15)
        loss.item()
    if step % ADDED == ADDED - 1 and not evaluates_s:
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= world
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    session.report(loss=loss)
    if rank == 0:
        print(f"step {step} loss {float(loss.detach())!r}", flush=True)

digest = hashlib.sha256()
for tensor in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
    digest.update(tensor.detach().cpu().numpy().tobytes())
if rank == 0:
    print(f"final state sha256 {digest.hexdigest()}", flush=True)
time.sleep(0.2)  # torch 2.13: gloo's threads may not outlive the group that is destroyed under them
distributed.destroy_process_group()
