"""Finds a loop of the script's own beside Megatron's. Such a script calls `initialize_megatron` from a `pretrain` of its own."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from ..attach.attach import attach
from ..attach.unknown_loop import tell_unknown
from .hooks import MARK, replace_everywhere
from .megatron_entry import watch


def wrap(initialize: Any) -> None:
    """Wrap `initialize_megatron` in the module that was just executed, and in each module that has already imported the function."""
    original = initialize.initialize_megatron
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        find(sys._getframe(1))
        return original(*args, **kwargs)

    setattr(initialize_megatron, MARK, True)
    initialize.initialize_megatron = initialize_megatron
    replace_everywhere(original, initialize_megatron)


def find(frame: FrameType | None) -> None:
    """Hook into the loop of the innermost caller that has a `train` and a `train_step`. frame: the caller of `initialize_megatron`."""
    while frame is not None:
        if all(callable(frame.f_globals.get(name)) for name in ("train", "train_step")):
            watch(frame.f_globals, _tell_at_the_first_step)
            return
        frame = frame.f_back
    _tell_at_the_first_step(sys.argv[0], "it has no train and train_step as Megatron has them")


def _tell_at_the_first_step(loop: str, why: BaseException | str) -> None:
    """After the first step of any optimizer, say that the loop is not known, unless a loop with a session has begun by then."""

    def stepped(*_: Any) -> None:
        handle.remove()
        attached = attach(trains=False)
        if attached and not attached.page.built_ns:
            tell_unknown(loop, why)

    handle = register_optimizer_step_post_hook(stepped)
