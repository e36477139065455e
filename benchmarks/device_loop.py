"""The training of `overhead.py` and `recovery.py` on devices: linear layers under DistributedDataParallel, AdamW, bfloat16 autocast.

    torchrun --nproc-per-node 2 device_loop.py DEVICE LAYERS WIDTH BATCH STEPS [--built-on-the-host]

Each step's line has the bits of its loss. If MT_BENCHMARK_STAMPS names a file, each rank appends a line of JSON to it after its first step:
its pid, and when it began each part of its start.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mt_resilient import Session


def main() -> None:
    began = [("main", time.monotonic())]
    kind, layers, width, batch, steps = sys.argv[1], *map(int, sys.argv[2:6])
    where = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind != "cpu" else torch.device(kind)
    if kind != "cpu":
        getattr(torch, kind).set_device(where)
    torch.zeros(1, device=where)
    began.append(("group", time.monotonic()))
    backend = {"cuda": "nccl", "musa": "mccl"}.get(kind, "gloo")
    distributed.init_process_group(backend, device_id=where if kind == "cuda" else None)
    distributed.barrier()
    began.append(("model", time.monotonic()))
    torch.manual_seed(1)
    with torch.device("cpu" if "--built-on-the-host" in sys.argv else where):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    model = DistributedDataParallel(model.to(where))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    began.append(("session", time.monotonic()))
    session = Session(model=model, optimizer=optimizer)
    for step in session.steps(steps):
        if len(began) == 4:
            began.append(("step", time.monotonic()))
        inputs = torch.randn(
            batch, width, device=where, generator=torch.Generator(where).manual_seed(session.data_step)
        )
        with torch.autocast(kind, torch.bfloat16):
            loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lost = loss.item()
        session.report(loss=lost)
        if distributed.get_rank() == 0:
            print("step", step, lost.hex(), flush=True)
        if len(began) == 5:
            began.append(("trains", time.monotonic()))
            if "MT_BENCHMARK_STAMPS" in os.environ:
                with open(os.environ["MT_BENCHMARK_STAMPS"], "a", encoding="ascii") as file:
                    file.write(json.dumps({"pid": os.getpid(), **dict(began)}) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
