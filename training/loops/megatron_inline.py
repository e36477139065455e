"""Hooks for loops that write checkpoints, and decide when to end, within `train` itself. Megatron-LM 0.9 does so.

The boundary is at the end of `training_log`, or of the evaluation if there is one after this step. So the boundary is right before the
point where newer versions of Megatron call `checkpoint_and_decide_exit`.
"""

from __future__ import annotations

import inspect
from typing import Any

from ...resilience.inprocess.tally import Directive
from ..attach.unknown_loop import UnknownLoop
from .base import JumpAsked, RewindAsked
from .hooks import parameters
from .megatron import BOUNDARY, FLOPS, MegatronLoop

_INSTEAD = ("training_log", "evaluate_and_print_results", "save_checkpoint_and_time")


class InlineLoop(MegatronLoop):
    def look_up(self, inner: dict[str, Any]) -> None:
        if missing := [name for name in _INSTEAD if inner.get(name) is None]:
            raise UnknownLoop(f"it has neither {BOUNDARY} nor {missing[0]}")
        self.log_parameters = parameters(inner["training_log"], "iteration")
        self.code = inspect.unwrap(self.outer["train"]).__code__
        if FLOPS not in (*self.code.co_varnames, *self.code.co_cellvars):
            raise UnknownLoop(f"it has neither {BOUNDARY} nor a variable {FLOPS}")
        self.step = -1
        self.due = False
        """Whether this step's boundary comes after its evaluation."""
        self.jumps = False
        """Whether data is skipped after the loop has written its own checkpoint of this step."""
        self.judged = True
        """Whether this step's boundary was the last one, or brought an order to leave."""

    def install_boundary(self, inner: dict[str, Any]) -> None:
        self.install(inner, training_log=self.training_log, save_checkpoint_and_time=self.save_checkpoint_and_time)

    def training_log(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        iteration, known = self.log_parameters.bind(*args, **kwargs).arguments["iteration"], self.args
        self.step, self.judged = iteration, False
        self.due = bool(known.eval_interval and iteration % known.eval_interval == 0 and known.do_valid)
        if not self.due:
            self.cross()
        return result

    def evaluate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().evaluate(original, *args, **kwargs)
        if self.due:
            self.due = False
            self.cross()
        return result

    def cross(self) -> None:
        """Run the boundary. If the ranks are to leave, let the loop do so by itself."""
        frame = inspect.currentframe()
        while frame and frame.f_code is not self.code:
            frame = frame.f_back
        assert frame is not None
        saves, last = self.at(self.step, frame.f_locals[FLOPS])
        leaves = False
        try:
            leaves = self.boundary(self.step, lambda: False, saves=saves, last=last)
        except JumpAsked:
            self.jumps = saves
            if not saves:
                raise
        self.judged = last or leaves
        if leaves:
            self.args.exit_interval = 1
            self.args.save = self.args.save if saves else None

    def save_checkpoint_and_time(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.session is not None
        with self.session.pausing("checkpoint"):
            result = original(*args, **kwargs)
        if self.jumps:
            self.jumps = False
            raise JumpAsked
        return result

    def run(self, original: Any, bound: inspect.BoundArguments) -> Any:
        """Call the loop. If the loop ends for its own reasons (its time limit, or a signal), its last step is judged only after that."""
        try:
            return super().run(original, bound)
        except SystemExit:
            assert self.session is not None
            if not self.judged and self.session.close(self.step) is Directive.REWIND:
                raise RewindAsked from None
            raise

    def rebuild(self, given: dict[str, Any]) -> None:
        self.jumps = False
        self.stop_timer("eval-time")
        super().rebuild(given)
