"""A training of a given size, started by `snapshot.py` under `mt-resilient run`: a plain model with AdamW on one rank.

    python snapshot_loop.py DEVICE MiB STEPS

Each step also multiplies matrices, as often as fits into a quarter of a second. The script prints one line: `steps`, and a JSON list of the
seconds of each step, boundary included.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise

import torch
from torch import distributed, nn

from mt_resilient import Session

WIDTH, PRODUCTS_S = 1024, 0.25
LAYER_MIB = 12
"""A layer's parameters and AdamW's two moments, in float32."""


def main() -> None:
    kind, mib, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    distributed.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, mib // LAYER_MIB)))).to(kind)
    optimizer = torch.optim.AdamW(model.parameters())
    session = Session(model=model, optimizer=optimizer)
    factor = torch.randn(2048, 2048, device=kind)

    def multiply(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            product = factor @ factor
        product.sum().item()  # wait for the device
        return time.perf_counter() - started

    products = max(1, round(5 * PRODUCTS_S / min(multiply(5) for _ in range(4))))
    inputs, times = torch.randn(64, WIDTH, device=kind), [time.perf_counter()]
    for _ in session.steps(steps):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        multiply(products)
        optimizer.step()
        session.report(loss=loss.item(), grad_norm=1.0)
        times.append(time.perf_counter())
    print("steps", json.dumps([after - before for before, after in pairwise(times[1:])]), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
