"""Accelerate says when the optimizer steps, and each batch is a step: torchrun --nproc-per-node 2 synchronizing.py"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "everyday"))
from common import arguments, batch, finish, network

from mt_resilient import Session

args = arguments()
accelerator = Accelerator(gradient_accumulation_steps=7)
set_seed(1234)
model, optimizer = accelerator.prepare(model := network(), torch.optim.AdamW(model.parameters(), lr=1e-2))
session = Session(model=model, optimizer=optimizer)
for step in session.steps(args.steps):
    inputs, targets = batch(session.data_step, accelerator.device)
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    session.report(loss=loss)
    accelerator.print(f"step {step} loss {loss.item()!r}", flush=True)
finish(model, optimizer)
