"""Hooks for Megatron-LM's unmodified loop: `megatron.training.training` from 0.9 on, and loops of the same shape.

The boundary (the moment between two steps) is at `checkpoint_and_decide_exit`. At this point, the counters of iterations and consumed
samples have been advanced. When `train_step` returns, they have not. (`megatron_inline.py` has the boundary of 0.9, which has no such
function.) Functions are wrapped in the namespace where `train` itself looks them up. Patches like Moore Threads' replace `train` by a
function of another module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from ..attach.unknown_loop import UnknownLoop, tell_once
from .base import CALCULATOR, CONSUMED, TRAINING, VALIDATION, HookedLoop
from .counters import Counters
from .data_iterators import begun
from .external_data import external_data
from .hooks import disable_rerun, forget_attention_maxima, needed, parameters
from .parameter_gather import gather_parameters

BOUNDARY = "checkpoint_and_decide_exit"
FLOPS = "num_floating_point_operations_so_far"
_FIRST = "is_first_iteration"
_COUNTERS = (CONSUMED, "skipped_train_samples", "consumed_valid_samples")
_OF_TRAIN = ("model", "optimizer", "opt_param_scheduler", "config", TRAINING, VALIDATION)
_COUNTED = ("single", "cyclic")
"""Values of `--dataloader-type` with which the data follows from the counters."""
_FIM = (
    "the random numbers of --fim-data are in no snapshot: after a recovery, its datasets draw them from the seed on, so other samples are "
    "rearranged than in an undisturbed run"
)


class MegatronLoop(HookedLoop):
    def __init__(self, outer: dict[str, Any], inner: dict[str, Any]) -> None:
        """outer: the namespace in which `pretrain` looks up its functions. inner: the namespace in which `train` does."""
        super().__init__()
        self.outer = outer
        self.goes_on = False
        """Whether this call of `train` continues an earlier one."""
        self.live: dict[str, Any] = {}
        self.eval_iters: Any = None
        """The number of validation steps, as the script gave it."""
        needed(outer, "train", "build_train_valid_test_data_iterators", "get_args", "get_timers", "mpu")
        needed(inner, "train_step")
        parameters(outer["train"], *_OF_TRAIN)
        needed(vars(sys.modules[CALCULATOR]), "update_num_microbatches", "get_current_global_batch_size")
        self.build = inspect.unwrap(outer["build_train_valid_test_data_iterators"])
        self.look_up(inner)
        self.install(outer, build_train_valid_test_data_iterators=self.builder, train=self.train)
        self.install(inner, train_step=self.train_step)
        self.install_boundary(inner)
        self.install_evaluation(inner, outer)

    def look_up(self, inner: dict[str, Any]) -> None:
        """Look up what the boundary needs. Raises UnknownLoop."""
        self.boundary_parameters = parameters(inner[BOUNDARY], "iteration", FLOPS)

    def install_boundary(self, inner: dict[str, Any]) -> None:
        self.install(inner, checkpoint_and_decide_exit=self.checkpoint_and_decide_exit)
        if "training_log" in inner and _FIRST in inspect.signature(inner["training_log"]).parameters:
            self.install(inner, training_log=self.training_log)

    @property
    def args(self) -> Any:
        return self.outer["get_args"]()

    def sources(self, given: Mapping[str, Any]) -> dict[str, Any]:
        args = self.args
        self.live = {"iteration": args.iteration, FLOPS: getattr(args, FLOPS)}
        if getattr(args, "perform_rl_step", False):
            raise UnknownLoop("with --perform-rl-step, it loads a checkpoint by itself")
        self.positioned = getattr(args, "dataloader_type", "single") in _COUNTED
        self.data = None if self.positioned else external_data(given[TRAINING], given[VALIDATION])
        if getattr(args, "fim_data", False):
            tell_once(_FIM)
        return {
            **({"data": self.data} if self.data else {}),
            "model": given["model"],
            "optimizer": given["optimizer"],
            "scheduler": given["opt_param_scheduler"],
            "counters": Counters(args, _COUNTERS, self.live),
        }

    def prepare(self, given: Mapping[str, Any]) -> None:
        self.args.check_for_nan_in_loss_and_grad = False
        disable_rerun()

    def iteration(self) -> int:
        return int(self.args.iteration)

    def complete(self) -> bool:
        return bool(self.live["iteration"] >= self.args.train_iters)

    def total(self) -> object:
        return self.args.train_iters

    def checkpoint_and_decide_exit(self, original: Any, *args: Any, **kwargs: Any) -> bool:
        given = self.boundary_parameters.bind(*args, **kwargs).arguments
        saves, last = self.at(given["iteration"], given[FLOPS])
        return self.boundary(given["iteration"], lambda: original(*args, **kwargs), saves=saves, last=last)

    def training_log(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `training_log` as if `train` had not been left. From Megatron 0.16 on, it prints the first step of each call of `train` out
        of turn, and counts that step again in the next line."""
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments[_FIRST] = given.arguments.get(_FIRST, False) and not self.goes_on
        return original(*given.args, **given.kwargs)

    def at(self, iteration: int, flops: Any) -> tuple[bool, bool]:
        """Note where the loop is. Return whether it writes its own checkpoint now, and whether this is its last step."""
        known = self.args
        self.live["iteration"], self.live[FLOPS] = iteration, flops
        last = iteration >= known.train_iters or bool(known.exit_interval and iteration % known.exit_interval == 0)
        every = (known.save_interval, getattr(known, "non_persistent_save_interval", None))
        return bool(known.save) and any(interval and iteration % interval == 0 for interval in every), last

    def skips(self) -> bool:
        counted = getattr(self.args, "dataloader_type", "single") in _COUNTED
        return counted and not getattr(self.args, "phase_transition_iterations", None)

    def rebuild(self, given: dict[str, Any]) -> None:
        self.consume(self.consumed())
        self.goes_on = self.iteration() > 0
        self.stop_timer("interval-time")
        given["config"].no_sync_func = None
        gather_parameters(given["model"], given["optimizer"])
        forget_attention_maxima(given["model"])
        built = self.created(self.build_all)
        train, valid, _ = (begun(list(each)) for each in zip(*built, strict=True))
        several = len(built) > 1
        given[TRAINING] = train if several else train[0]
        given[VALIDATION] = valid if several else valid[0]
        if self.data:
            self.data.put_back(given[TRAINING], given[VALIDATION])

    def build_all(self) -> list[Any]:
        """Return new data iterators of each virtual stage. With `--full-validation`, Megatron replaces the number of validation steps when
        it first creates them."""
        built, args = [], self.args
        kept, args.eval_iters = getattr(args, "eval_iters", None), self.eval_iters
        for stage, (given, named) in enumerate(self.iterators):
            if len(self.iterators) > 1:
                self.outer["mpu"].set_virtual_pipeline_model_parallel_rank(stage)
            built.append(self.build(*given, **named))
        args.eval_iters = kept
        return built

    def builder(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.iterators:
            self.eval_iters = getattr(self.args, "eval_iters", None)
        return super().builder(original, *args, **kwargs)

    def stop_timer(self, name: str) -> None:
        timer = self.outer["get_timers"]()(name, log_level=0)
        if getattr(timer, "_started", False):
            timer.stop()
