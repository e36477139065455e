"""The common part of the hooks for other projects' training loops. These hooks run a session around the project's `train`.

For a rewind in place, all ranks raise an exception at the boundary (the moment between two steps), which leaves `train`. The ranks restore
the state, create new data iterators from the restored counters, and call `train` again. A restarted process also restores the state and
creates the iterators before it calls `train`.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from ...resilience.errors import ResilientError
from ...resilience.inprocess.tally import Directive
from ..attach.rank_stderr import say
from ..attach.unknown_loop import name_of, tell_unknown
from ..boundary.boundary import Boundaries
from ..boundary.step_metrics import Figures
from ..state.partitioned import Partitioned
from .data_iterators import one_batch_before
from .hooks import expect_steps, resumes
from .parameter_gather import finish_gathers

T = TypeVar("T")

TRAINING, VALIDATION = "train_data_iterator", "valid_data_iterator"
CONSUMED = "consumed_train_samples"
CALCULATOR = "megatron.core.num_microbatches_calculator"


class RewindAsked(BaseException):
    """Leaves `train` at a boundary, on all ranks at the same step. RewindAsked is not an Exception, so that no `except Exception` in
    between catches it."""


class JumpAsked(BaseException):
    """Leaves `train` at a boundary after which data is skipped. The iterators are created again, to start after that data."""


class HookedLoop:
    """One run of another project's `train`. Subclasses know that project's names.

    A subclass looks up all names that it uses before it installs the first wrapper. If a name is missing, the loop is not changed."""

    def __init__(self) -> None:
        self.known = True
        """False: `train` is called in another way than the hooks expect, so all wrappers pass their calls on."""
        self.untold = False
        """Whether `train_step` returns its figures in a way that is not known."""
        self.session: Boundaries | None = None
        self.counters: Any = None
        self.data: Any = None
        """The position of data loaders that does not follow from the number of consumed samples, if it can be saved; else None."""
        self.figures = Figures()
        self.iterators: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of the calls that created the data iterators."""
        self.given: dict[str, Any] = {}
        """Arguments of `train`."""
        self.first: dict[str, Any] = {}
        """The iterators with which `train` was first called, by parameter. The code after `train` still has them."""
        self.positioned = False
        """Whether a restored step continues at its position in the data, although no data can be skipped."""

    # -- what a subclass defines ------------------------------------------------------------------------------------------

    def sources(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sources (the objects to save), taken from the arguments of `train`."""
        raise NotImplementedError

    def prepare(self, given: Mapping[str, Any]) -> None:
        """Before the first step, switch off checks that would end a rank although a rewind suffices."""
        raise NotImplementedError

    def iteration(self) -> int:
        """Return the number of completed steps, from which the loop starts."""
        raise NotImplementedError

    def complete(self) -> bool:
        """Whether the last step of the training is done."""
        raise NotImplementedError

    def total(self) -> object:
        """Return the number of steps of the whole training."""
        raise NotImplementedError

    def skips(self) -> bool:
        """Whether the loop finds its data by the number of consumed samples, so that some samples can be skipped."""
        raise NotImplementedError

    def rebuild(self, given: dict[str, Any]) -> None:
        """After a restore, prepare the loop for another call, and put new data iterators into `given`."""
        raise NotImplementedError

    # -- the wrappers -------------------------------------------------------------------------------------------------------

    def train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            bound = inspect.signature(original).bind(*args, **kwargs)
            given = self.given = bound.arguments
            self.first = {name: given.get(name) for name in (TRAINING, VALIDATION)}
            sources = self.sources(given)
            self.counters = sources["counters"]
            skips = self.skips()
            self.iteration(), self.complete(), self.total()
        except ResilientError:
            raise
        except Exception as error:
            self.leave_alone(original, error)
            return original(*args, **kwargs)
        try:
            self.session = Boundaries(**sources)
        except Partitioned as error:
            if resumes():
                raise
            self.leave_alone(original, error)
            return original(*args, **kwargs)
        self.session.fixed_data = not skips
        self.session.puts_data_back = self.data is not None or self.positioned
        self.session.cure = (
            "let the loop choose its data by the number of consumed samples (--dataloader-type single or cyclic, "
            "and no --phase-transition-iterations)"
        )
        if not self.session.observes:
            self.prepare(given)
        restored = self.session.restore() is not None
        before = self.consumed()
        batches = self.jump()
        after = self.consumed()
        if batches or restored:
            self.rebuild(given)
        if batches:
            self.consume(before)  # `begin` records the state before the jump
        rewinds = self.session.rewinds
        self.session.begin(self.iteration(), self.total())
        if self.session.rewinds == rewinds:
            if batches:
                self.consume(after)
        else:
            self.jump()
            self.rebuild(given)
            self.session.resume()
        while True:
            try:
                result = self.run(original, bound)
            except RewindAsked:
                self.session.rewind()
                self.jump()
                self.rebuild(given)
                self.session.resume()
                continue
            except JumpAsked:
                self.counters.settle()
                with self.session.same_randomness():
                    self.jump()
                    self.rebuild(given)
                continue
            except SystemExit as leaving:
                if not leaving.code:
                    self.session.finish(self.complete())
                raise
            self.session.finish(self.complete())
            return result

    def leave_alone(self, original: Callable[..., Any], why: Exception) -> None:
        """Let the loop run without hooks, and say so."""
        self.known = False
        expect_steps(False)
        tell_unknown(name_of(inspect.unwrap(original).__globals__), why)

    def run(self, original: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        """Call the loop."""
        return original(*bound.args, **bound.kwargs)

    def jump(self) -> int:
        """Skip the batches that must not be used at this step; return their number."""
        assert self.session is not None
        batches = 0 if self.complete() else self.session.jump(self.iteration())
        for _ in range(batches):
            self.consume(self.consumed())
            self.consume(self.consumed() + sys.modules[CALCULATOR].get_current_global_batch_size())
        return batches

    def created(self, create: Callable[[], T]) -> T:
        """Return what `create` returns: data iterators that begin where the counters say."""
        back = {CONSUMED: sys.modules[CALCULATOR].get_current_global_batch_size(), "iteration": 1}
        with one_batch_before(self.counters.holder, back) if self.complete() else nullcontext():
            return create()

    def consumed(self) -> int:
        """Return the number of samples before the next batch."""
        return int(getattr(self.counters.holder, CONSUMED, 0))

    def consume(self, samples: int) -> None:
        """Continue after this many samples. The size of the next batch, which may grow in the training, follows from it."""
        setattr(self.counters.holder, CONSUMED, samples)
        sys.modules[CALCULATOR].update_num_microbatches(samples, consistency_check=False)

    def train_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        try:
            self.figures = _figures(result)
        except Exception as error:
            if not self.untold:
                say(
                    f"what this loop's train_step returns is not known ({error!r}): no loss and no gradient norm is judged"
                )
            self.untold, self.figures = True, Figures()
        return result

    def evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the current iterator. The last validation comes after `train`, and its caller still has the first iterator."""
        bound = self._current(original, "data_iterator", VALIDATION, *args, **kwargs)
        with self.session.pausing("evaluation") if self.session else nullcontext():
            return original(*bound.args, **bound.kwargs)

    def save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Write the script's own checkpoint, with the position of the current iterator."""
        bound = self._current(original, TRAINING, TRAINING, *args, **kwargs)
        return original(*bound.args, **bound.kwargs)

    def _current(self, original: Callable[..., Any], parameter: str, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the arguments of a call, with the current iterator in place of the first one."""
        bound = inspect.signature(original).bind(*args, **kwargs)
        if bound.arguments.get(parameter) is not None and bound.arguments[parameter] is self.first.get(name):
            bound.arguments[parameter] = self.given.get(name)
        return bound

    def builder(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.iterators.append((args, kwargs))
        return original(*args, **kwargs)

    def boundary(self, step: int, original: Callable[[], bool], *, saves: bool, last: bool) -> bool:
        """Run the session's boundary, then the loop's `original`; return whether to leave the loop. Raises RewindAsked, or JumpAsked.
        saves: the script writes its own checkpoint at this step, so the step must be judged first."""
        ordered = self._pass(step, judged_now=last or saves, last=last)
        leaves = self._decides(original) if saves or not ordered else True
        if leaves and not ordered and not last:  # the loop's own reasons: its time limit, or a signal
            self._pass(step, judged_now=True, last=True)
        if not (leaves or ordered or last) and self.session is not None and self.session.jump(step):
            raise JumpAsked
        return leaves or ordered

    def _decides(self, original: Callable[[], bool]) -> bool:
        assert self.session is not None
        with self.session.pausing("checkpoint"):
            return original()

    def _pass(self, step: int, *, judged_now: bool, last: bool) -> bool:
        assert self.session is not None
        finish_gathers(self.given["model"])
        directive = self.session.boundary(step, self.figures, judged_now=judged_now, last=last)
        if directive is Directive.REWIND:
            raise RewindAsked
        return directive is Directive.LEAVE

    def install_evaluation(self, *namespaces: dict[str, Any]) -> None:
        """Wrap the functions that evaluate and save, in the namespaces where the loop, and the code after the loop, look them up. The same
        namespace may be given twice."""
        for namespace in {id(each): each for each in namespaces}.values():
            for name, wrapper in (("evaluate_and_print_results", self.evaluate), ("save_checkpoint", self.save)):
                if name in namespace:
                    self.install(namespace, **{name: wrapper})

    def install(self, namespace: dict[str, Any], **wrappers: Callable[..., Any]) -> None:
        """Wrap the functions of these names with `wrappers`. A wrapper gets the original function as its first argument."""
        for name, wrapper in wrappers.items():
            original = namespace[name]
            namespace[name] = functools.wraps(original)(functools.partial(self._through, wrapper, original))

    def _through(self, wrapper: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs) if self.known else original(*args, **kwargs)


def _figures(result: Any) -> Figures:
    """Return the figures of a step, from what `train_step` returns: losses, whether the step was skipped, …, gradient norm, …"""
    losses, skipped, grad_norm = result[0], result[1], result[2 if len(result) == 4 else 5]  # 4: Megatron 0.9
    return Figures(_first_or_worst(losses), None if grad_norm is None else float(grad_norm), bool(skipped))


def _first_or_worst(losses: Mapping[str, Any]) -> float | None:
    """Return one number for all losses of a step: one that is not finite, if there is any, and otherwise the first loss."""
    numbers = [
        float(v) for v in losses.values() if (torch.is_tensor(v) and v.numel() == 1) or isinstance(v, (int, float))
    ]
    return next((n for n in numbers if not math.isfinite(n)), numbers[0] if numbers else None)
