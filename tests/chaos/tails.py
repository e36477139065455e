"""What scripts do behind their loops: `tails.py raises`; `tails.py breaks SECONDS`, which leaves it early and takes so long;
`tails.py uneven SECONDS`, whose rank 1 is there before the others; and `tails.py uses SECONDS`, which takes so long, and then prints what
only the loop's body makes."""

import os
import sys
import time

import torch
from torch import distributed, nn

from mt_resilient import Session

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
session = Session(model=model, optimizer=optimizer)
for step in session.steps(15 if sys.argv[1] == "uneven" and os.environ["RANK"] == "1" else 20):
    time.sleep(0.05)
    optimizer.zero_grad()
    loss = model(torch.full((1, 2), step / 20)).square().sum()
    loss.backward()
    optimizer.step()
    if sys.argv[1] == "breaks" and step == 15:
        break
if sys.argv[1] == "raises":
    raise RuntimeError("no such bucket")
print("behind the loop", flush=True)
time.sleep(float(sys.argv[2]))
if sys.argv[1] == "uses":
    print("the last loss:", loss.item(), flush=True)
time.sleep(0.2)
distributed.destroy_process_group()
