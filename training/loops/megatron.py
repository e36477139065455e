"""Hooks for Megatron-LM's unmodified loop: `megatron.training.training` from fdfcef87 (0.12) on.

The boundary (the moment between two steps) is at `checkpoint_and_decide_exit`. At this point, the iteration and the consumed samples have
been advanced; when `train_step` returns, they have not. Functions are wrapped in the namespace where `train` itself looks them up. Patches
like Moore Threads' replace `train` by a function of another module. The wrapping happens inside `pretrain`, when all other patches are in
place.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...resilience.clock import wall_s
from .base import Counters, HookedLoop, reenable_parameter_gather

_COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_MARK = "__mt_resilient__"


def wrap(training: Any) -> None:
    """Wrap `pretrain` in the module that was just executed, and in each module that has already imported the function."""
    original = training.pretrain
    if hasattr(original, _MARK):
        return
    training._TRAIN_START_TIME = wall_s()  # a forked rank starts later than the process that imported the module

    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        MegatronLoop(training, original)
        return original(*args, **kwargs)

    setattr(pretrain, _MARK, True)
    training.pretrain = pretrain
    # Also wrap `pretrain` in modules that imported it by name before this rank was forked.
    for module in [m for m in sys.modules.values() if isinstance(m, ModuleType)]:
        for name in [name for name, value in list(vars(module).items()) if value is original]:
            setattr(module, name, pretrain)


class MegatronLoop(HookedLoop):
    def __init__(self, training: Any, pretrain: Any) -> None:
        super().__init__()
        self.training = training
        self.live: dict[str, Any] = {}
        outer = inspect.unwrap(pretrain).__globals__
        inner = inspect.unwrap(training.train).__globals__
        self.boundary_parameters = inspect.signature(inner["checkpoint_and_decide_exit"])
        self.install(outer, build_train_valid_test_data_iterators=self.builder)
        self.build = inspect.unwrap(outer["build_train_valid_test_data_iterators"])
        self.install(inner, train_step=self.train_step, checkpoint_and_decide_exit=self.checkpoint_and_decide_exit)
        self.install(outer, train=self.train)
        self.install_evaluation(inner, outer)

    @property
    def args(self) -> Any:
        return self.training.get_args()

    def sources(self, given: Mapping[str, Any]) -> dict[str, Any]:
        args = self.args
        self.live = {
            "iteration": args.iteration,
            "num_floating_point_operations_so_far": args.num_floating_point_operations_so_far,
        }
        return {
            "model": given["model"],
            "optimizer": given["optimizer"],
            "scheduler": given["opt_param_scheduler"],
            "counters": Counters(args, _COUNTERS, self.live),
        }

    def prepare(self, given: Mapping[str, Any]) -> None:
        self.args.check_for_nan_in_loss_and_grad = False
        rerun = sys.modules.get("megatron.core.rerun_state_machine")
        if rerun is not None:  # in its other modes, it exits with code 16 or 17 although the ranks can rewind
            rerun.get_rerun_state_machine().set_mode(rerun.RerunMode.DISABLED)

    def iteration(self) -> int:
        return int(self.args.iteration)

    def complete(self) -> bool:
        return bool(self.live["iteration"] >= self.args.train_iters)

    def checkpoint_and_decide_exit(self, original: Any, *args: Any, **kwargs: Any) -> bool:
        given = self.boundary_parameters.bind(*args, **kwargs).arguments
        iteration, known = given["iteration"], self.args
        self.live["iteration"] = iteration
        self.live["num_floating_point_operations_so_far"] = given["num_floating_point_operations_so_far"]
        last = iteration >= known.train_iters or bool(known.exit_interval and iteration % known.exit_interval == 0)
        every = (known.save_interval, getattr(known, "non_persistent_save_interval", None))
        saves = bool(known.save) and any(interval and iteration % interval == 0 for interval in every)
        return self.boundary(iteration, lambda: original(*args, **kwargs), saves=saves, last=last)

    def skips(self) -> bool:
        return getattr(self.args, "dataloader_type", "single") in ("single", "cyclic")

    def skip(self, batches: int) -> None:
        if not batches:
            return
        calculator = sys.modules["megatron.core.num_microbatches_calculator"]
        calculator.update_num_microbatches(self.args.consumed_train_samples, consistency_check=False)
        self.args.consumed_train_samples += batches * calculator.get_current_global_batch_size()

    def rebuild(self, given: dict[str, Any]) -> None:
        calculator = sys.modules["megatron.core.num_microbatches_calculator"]
        calculator.update_num_microbatches(self.args.consumed_train_samples, consistency_check=False)
        timer = self.training.get_timers()("interval-time")
        if getattr(timer, "_started", False):
            timer.stop()
        given["config"].no_sync_func = None
        reenable_parameter_gather(given["model"], given["optimizer"])
        if self.iteration() >= self.args.train_iters:
            return  # nothing is left to train on, and samplers refuse to start at their end
        built = []
        for stage, (args, kwargs) in enumerate(self.iterators):
            if len(self.iterators) > 1:
                self.training.mpu.set_virtual_pipeline_model_parallel_rank(stage)
            built.append(self.build(*args, **kwargs))
        train, valid, _ = zip(*built, strict=True)
        several = len(built) > 1
        given["train_data_iterator"] = list(train) if several else train[0]
        given["valid_data_iterator"] = list(valid) if several else valid[0]
