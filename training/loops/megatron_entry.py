"""Finds Megatron-LM's loop when its `pretrain` is called. By then, all other patches are in place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ...resilience.clock import wall_s
from ..attach.unknown_loop import tell_unknown
from .hooks import MARK, before_call, expect_steps, hook_in, needed
from .megatron import BOUNDARY, MegatronLoop
from .megatron_inline import InlineLoop


def wrap(training: Any) -> None:
    """Wrap `pretrain` of the module that was just executed."""
    if before_call(training, "pretrain", lambda pretrain: watch(inspect.unwrap(pretrain).__globals__)):
        training._TRAIN_START_TIME = wall_s()  # a forked rank starts later than the process that imported the module


def watch(namespace: dict[str, Any], tell: Callable[[str, BaseException], None] = tell_unknown) -> None:
    """Hook into the loop in this namespace, once. namespace: where `pretrain` looks up its functions. tell: called if the loop is not
    known."""
    if namespace.setdefault(MARK, False):
        return
    namespace[MARK] = True
    hook_in(namespace, lambda: loop_of(namespace), tell)


def loop_of(namespace: dict[str, Any]) -> MegatronLoop:
    """Return the hooks for the loop in this namespace, installed. Raises UnknownLoop."""
    needed(namespace, "train")
    inner = inspect.unwrap(namespace["train"]).__globals__
    loop = (MegatronLoop if BOUNDARY in inner else InlineLoop)(namespace, inner)
    expect_steps()
    return loop
