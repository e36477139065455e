"""A script whose training ends, and whose rank 1 then does not: it waits for ever where it destroys its process group, as gloo
does now and then."""

import os
import time
from functools import partial

import torch
from torch import distributed, nn
from torch.distributed import distributed_c10d

from mt_resilient import Session

distributed.init_process_group("gloo")
model = nn.Linear(2, 2)
session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for _ in session.steps(3):
    pass
time.sleep(0.2)
if os.environ["RANK"] == "1":
    distributed_c10d._unregister_all_process_groups = partial(time.sleep, 10_000)  # in C, as gloo hangs
distributed.destroy_process_group()
