"""A training of which rank 1 evaluates by itself, for longer than a step may take, and does not move meanwhile. With UPLOADS, rank 0
does so without telling the session."""

import os
import time

import torch
from torch import distributed, nn

from mt_resilient import Session

distributed.init_process_group("gloo")
model = nn.Linear(2, 2)
session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(60):
    time.sleep(0.02)
    if step == 30 and os.environ["RANK"] == "1":
        with session.pausing("evaluation"):
            time.sleep(12)
    if step == 20 and os.environ["RANK"] == "0" and "UPLOADS" in os.environ:
        time.sleep(16)
    distributed.barrier()
