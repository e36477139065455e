"""Finds a loop like Megatron's in a script that calls `initialize_megatron` from a `pretrain` of its own."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ..attach.attach import attach
from ..attach.unknown_loop import tell_unknown
from .hooks import before_call
from .megatron_entry import watch


def wrap(initialize: Any) -> None:
    """Wrap `initialize_megatron` of the module that was just executed."""
    before_call(initialize, "initialize_megatron", lambda _: find(sys._getframe(1)))


def find(frame: FrameType | None) -> None:
    """Hook into the loop of the innermost caller that has a `train` and a `train_step`. frame: the caller of `initialize_megatron`."""
    while frame is not None:
        if all(callable(frame.f_globals.get(name)) for name in ("train", "train_step")):
            watch(frame.f_globals, _tell_at_the_first_step)
            return
        frame = frame.f_back
    _tell_at_the_first_step(sys.argv[0], "it has no train and train_step as Megatron has them")


def _tell_at_the_first_step(loop: str, why: BaseException | str) -> None:
    """After the first step of any optimizer, print that the loop is not known, unless a loop with a session has begun by then."""

    def stepped(*_: Any) -> None:
        handle.remove()
        attached = attach(trains=False)
        if attached and not attached.page.built_ns:
            tell_unknown(loop, why)

    handle = register_optimizer_step_post_hook(stepped)
