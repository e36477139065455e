"""What scripts do behind their loops: `tails.py raises`; `tails.py breaks SECONDS`, which leaves it early and takes so long; and
`tails.py uneven SECONDS`, whose rank 1 is there before the others."""

import os
import sys
import time

import torch
from torch import distributed, nn

from mt_resilient import Session

distributed.init_process_group("gloo")
model = nn.Linear(2, 2)
session = Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
for step in session.steps(15 if sys.argv[1] == "uneven" and os.environ["RANK"] == "1" else 20):
    time.sleep(0.05)
    if sys.argv[1] == "breaks" and step == 15:
        break
if sys.argv[1] == "raises":
    raise RuntimeError("no such bucket")
time.sleep(float(sys.argv[2]))
time.sleep(0.2)
distributed.destroy_process_group()
