"""A script of which rank 1 never gets to its first step: its peers wait for it in a collective."""

import os
import time

import torch
from torch import distributed, nn

from mt_resilient import Session

distributed.init_process_group("gloo")
model = nn.Linear(2, 2)
session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
if os.environ["RANK"] == "1":
    time.sleep(10_000)
distributed.barrier()
for _ in session.steps(3):
    pass
