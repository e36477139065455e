"""Runs a training script in one rank of which a bit flips, once, after an optimizer's step.

`torchrun … flipped.py SCRIPT ARGUMENTS…` with FLIP=STEP:RANK:WHAT, where WHAT is `parameter` or the name of an optimizer's state
(`exp_avg`). The file FLIPPED says that it has happened: what is computed again is computed rightly. With FLIP_AGAIN it happens as often as
the step comes.
"""

import os
from contextlib import suppress
from pathlib import Path

import gated
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

BIT = 1 << 12
"""Of the mantissa: nothing in the figures of a step shows it."""


def flip(optimizer: torch.optim.Optimizer, *_: object) -> None:
    step, rank, what = os.environ["FLIP"].split(":")
    parameter = optimizer.param_groups[0]["params"][0]
    state = optimizer.state[parameter]
    if (int(state["step"]), os.environ["RANK"]) != (int(step), rank):
        return
    with suppress(FileExistsError):
        Path(os.environ["FLIPPED"]).touch(exist_ok="FLIP_AGAIN" in os.environ)
        tensor = parameter.detach() if what == "parameter" else state[what]
        tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
        tensor.view(-1).view(torch.int32)[3] ^= BIT


if __name__ == "__main__":
    register_optimizer_step_post_hook(flip)
    gated.main()
