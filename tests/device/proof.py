"""The training of `prove.py`: a model with dropout on the device, gradients averaged over the ranks.

    torchrun --nproc-per-node N proof.py KIND FAULT FOLDER

KIND: musa, cuda, cpu. FAULT strikes the last rank at step AT: kill, nan, hang; none. The rank first makes the file `fault` in FOLDER, and
the fault does not strike if it is there. Rank 0 appends a line to `steps` for each step: the time, the step, the bits of its loss. It
prints a SHA-256 of what was trained.
"""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

from mt_resilient import Session

kind, fault, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
if kind == "musa":
    import torch_musa  # noqa: F401

AT, STEPS = 30, 60
module = None if kind == "cpu" else getattr(torch, kind)
device = torch.device("cpu")
if module:
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % module.device_count())
    module.set_device(device)
torch.use_deterministic_algorithms(True, warn_only=True)
distributed.init_process_group({"cuda": "nccl", "musa": "mccl"}.get(kind, "gloo"))
rank, world = distributed.get_rank(), distributed.get_world_size()
torch.manual_seed(7)
width = 64 if kind == "cpu" else 256
model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)).to(device)
torch.manual_seed(rank)  # dropout differs from rank to rank
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)


def strikes(name: str, step: int) -> bool:
    if (fault, step, rank) != (name, AT, world - 1) or (folder / "fault").exists():
        return False
    (folder / "fault").write_text(f"{time.time():.3f}")
    return True


session = Session(model=model, optimizer=optimizer, scheduler=scheduler)
for step in session.steps(STEPS):
    time.sleep(0.05)
    generator = torch.Generator().manual_seed(session.data_step * world + rank)
    inputs = torch.randn(32, width, generator=generator)
    loss = nn.functional.mse_loss(model(inputs.to(device)), inputs.sin().sum(1, keepdim=True).to(device))
    optimizer.zero_grad()
    loss.backward()
    if strikes("kill", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if strikes("hang", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if strikes("nan", step):
        model[0].weight.grad[0, 0] = float("nan")
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
        parameter.grad /= world
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    session.report(loss=loss, grad_norm=norm)
    if rank == 0:
        with (folder / "steps").open("a") as file:
            file.write(f"{time.time():.3f} {step} {loss.item().hex()}\n")

digest = hashlib.sha256()
for tensor in [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]:
    digest.update(tensor.detach().cpu().numpy().tobytes())
if rank == 0:
    print(f"final state sha256 {digest.hexdigest()}", flush=True)
time.sleep(0.2)  # gloo's threads may not outlive the group that is destroyed under them
distributed.destroy_process_group()
