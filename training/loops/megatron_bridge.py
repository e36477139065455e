"""Hooks for Megatron-Bridge's unmodified loop (0.3). The loop reads its train state at every step, so changing that object rewinds the
loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from .base import CONSUMED, TRAINING, VALIDATION, HookedLoop
from .counters import Counters
from .data_iterators import begun
from .hooks import MARK, disable_rerun, expect_steps, forget_attention_maxima, hook_in, needed, parameters
from .parameter_gather import gather_parameters

_COUNTERS = (
    "step",
    CONSUMED,
    "skipped_train_samples",
    "consumed_valid_samples",
    "floating_point_operations_so_far",
)


def wrap(pretrain: ModuleType) -> None:
    """Wrap the functions that `_pretrain`, `setup` and `train` look up. `pretrain`: the executed module
    `megatron.bridge.training.pretrain`."""
    if not hasattr(pretrain, MARK):
        setattr(pretrain, MARK, True)
        hook_in(vars(pretrain), lambda: BridgeLoop(pretrain))


class BridgeLoop(HookedLoop):
    def __init__(self, pretrain: ModuleType) -> None:
        super().__init__()
        outer = vars(pretrain)
        needed(outer, "train", "setup")
        parameters(outer["train"], "global_state", "model", "optimizer", "scheduler", TRAINING, VALIDATION)
        inner = inspect.unwrap(outer["train"]).__globals__
        setup = inspect.unwrap(outer["setup"]).__globals__
        needed(inner, "train_step", "checkpoint_and_decide_exit")
        needed(setup, "setup_data_iterators")
        self.state: Any = None
        self.build = setup["setup_data_iterators"]
        self.boundary_parameters = parameters(inner["checkpoint_and_decide_exit"], "state")
        self.install(setup, setup_data_iterators=self.builder)
        self.install(inner, train_step=self.train_step, checkpoint_and_decide_exit=self.checkpoint_and_decide_exit)
        self.install(outer, train=self.train)
        self.install_evaluation(inner, outer)

    def builder(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        expect_steps()
        return super().builder(original, *args, **kwargs)

    def sources(self, given: Mapping[str, Any]) -> dict[str, Any]:
        self.state = given["global_state"]
        return {
            "model": given["model"],
            "optimizer": given["optimizer"],
            "scheduler": given["scheduler"],
            "counters": Counters(self.state.train_state, _COUNTERS, {}),
        }

    def prepare(self, given: Mapping[str, Any]) -> None:
        with suppress(AttributeError):
            self.state.cfg.rerun_state_machine.check_for_nan_in_loss = False
        disable_rerun()

    def iteration(self) -> int:
        return int(self.state.train_state.step)

    def complete(self) -> bool:
        return bool(self.iteration() >= self.state.cfg.train.train_iters)

    def total(self) -> object:
        return self.state.cfg.train.train_iters

    def checkpoint_and_decide_exit(self, original: Any, *args: Any, **kwargs: Any) -> bool:
        given = self.boundary_parameters.bind(*args, **kwargs).arguments
        state = given["state"]
        step, config = int(state.train_state.step), state.cfg
        last = step >= config.train.train_iters
        last = last or bool(config.train.exit_interval and step % config.train.exit_interval == 0)
        every = config.checkpoint.save_interval
        saves = bool(config.checkpoint.save and every and step % every == 0)
        return self.boundary(step, lambda: original(*args, **kwargs), saves=saves, last=last)

    def skips(self) -> bool:
        return getattr(self.state.cfg.dataset, "dataloader_type", None) in ("single", "cyclic")

    def rebuild(self, given: dict[str, Any]) -> None:
        self.consume(self.consumed())
        timer = self.state.timers("interval-time")
        if getattr(timer, "_started", False):
            timer.stop()
        gather_parameters(given["model"], given["optimizer"])
        forget_attention_maxima(given["model"])
        args, kwargs = self.iterators[-1]
        train, valid, _ = self.created(lambda: self.build(*args, **kwargs))
        given[TRAINING], given[VALIDATION] = begun(train), begun(valid)
