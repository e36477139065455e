"""Faults inside unmodified Megatron loops, and a record of what such a loop computed; ordered through the environment alone.

    NEMESIS="nan-grad@5:1,kill@8:0"   what befalls which iteration on which global rank
    NEMESIS_HARD=1200:1360:0.3        the labels of these samples of a GPT dataset: this share is drawn at random
    NEMESIS_DIR=/tmp/run              where it is written down that a fault has happened: no replay or restarted process repeats it
    NEMESIS_FORGETS=expert_bias       no restoration puts back tensors and streams of random numbers with this in their names
    NEMESIS_LOSSES=/tmp/run/losses    <prefix>.<rank>: a line "iteration loss grad_norm" per step, as it comes; read the last of each
    NEMESIS_DIGEST=/tmp/run/digest    <prefix>.<rank>: SHA-256 of the model and optimizer state that `train` ended with

Iteration N (from 1) is the step that turns iteration N-1 into N. `nan-grad@N:R` puts NaN into one element of one gradient of rank R
right before its data-parallel reduction, once; `nan-grad*K@N:R` does so in the first K passes over that step (Megatron's own rerun and
a replay both count as passes). `kill@N:R` is SIGKILL at the same place: after backward (with --overlap-grad-reduce: within it), before
the optimizer; `term@N:R` is SIGTERM, for which Megatron has --exit-signal-handler; `hang@N:R` never returns; `param@N:R` changes the
largest parameter of rank R. Everything depends on `megatron.training.training` and `megatron.bridge.training.train`; loops of one's own
have neither.

The environment is read when a step runs, not at import: a rank may be forked from a process that was started without it.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from after_import import after_import

_iteration: int | None = None
"""The iteration that this process is computing, while it is inside train_step."""

_pass_begins = False
"""True from the zeroing of the gradients to the first gradient reduction after it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One entry of NEMESIS."""

    kind: str
    iteration: int
    rank: int
    times: int

    def strike(self) -> bool:
        """Whether it is to happen now: True at most `times` times in a run, whichever processes ask."""
        for count in range(1, self.times + 1):
            marker = os.path.join(os.environ["NEMESIS_DIR"], f"{self.kind}@{self.iteration}:{self.rank}.{count}")
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False


def ordered() -> list[Fault]:
    """What NEMESIS says. Raises ValueError where it cannot be read."""
    faults = []
    for entry in filter(None, os.environ.get("NEMESIS", "").split(",")):
        match = re.fullmatch(r"(nan-grad|kill|term|hang|param)(?:\*(\d+))?@(\d+):(\d+)", entry)
        if match is None:
            raise ValueError(
                f"NEMESIS: {entry!r} is none of nan-grad[*K]@ITERATION:RANK, and kill, term, hang or param@ITERATION:RANK"
            )
        kind, times, iteration, rank = match.groups()
        faults.append(Fault(kind=kind, iteration=int(iteration), rank=int(rank), times=int(times or 1)))
    return faults


def _rank() -> int:
    return int(os.environ["RANK"])


# ----------------------------------------------------------------------------------------------------------------- faults


@after_import("megatron.core.distributed.distributed_data_parallel")
def notice_passes(module: Any) -> None:
    """Every pass over a step begins by zeroing the gradients."""
    zero = module.DistributedDataParallel.zero_grad_buffer

    @functools.wraps(zero)
    def zero_grad_buffer(self: Any) -> None:
        global _pass_begins
        _pass_begins = True
        zero(self)

    module.DistributedDataParallel.zero_grad_buffer = zero_grad_buffer


@after_import("megatron.core.distributed.param_and_grad_buffer")
def strike_before_reduction(module: Any) -> None:
    """Where every kind of data-parallel gradient reduction starts, before Megatron's own look at the gradients."""
    groups = getattr(module, "_ParamAndGradBucketGroup")  # noqa: B009  (private: say so)
    start = groups.start_grad_sync

    @functools.wraps(start)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _pass_begins
        if _pass_begins and _iteration is not None:
            for fault in ordered():
                if (fault.iteration, fault.rank) == (_iteration, _rank()) and fault.strike():
                    print(f"nemesis: {fault.kind} at iteration {_iteration} on rank {_rank()}", flush=True)
                    if fault.kind == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    while fault.kind == "hang":
                        signal.pause()
                    if fault.kind == "term":
                        os.kill(os.getpid(), signal.SIGTERM)
                        continue
                    if fault.kind == "param":
                        max(self.buckets[0].params_list, key=lambda param: param.numel()).data.mul_(-100)
                        continue
                    self.buckets[0].grad_data.view(-1)[0] = float("nan")
        _pass_begins = False
        return start(self, *args, **kwargs)

    groups.start_grad_sync = start_grad_sync


@after_import("megatron.core.datasets.gpt_dataset")
def draw_labels(module: Any) -> None:
    """Samples that no model can learn, and that are the same each time."""
    get = module.GPTDataset.__getitem__

    @functools.wraps(get)
    def __getitem__(self: Any, index: int | None) -> dict[str, Any]:
        sample = get(self, index)
        first, stop, share = os.environ.get("NEMESIS_HARD", "0:0:0").split(":")
        if index is not None and int(first) <= index < int(stop):
            import torch

            chance, labels = torch.Generator().manual_seed(int(index)), sample["labels"]
            drawn = torch.rand(len(labels), generator=chance) < float(share)
            sample["labels"] = torch.where(drawn, torch.randint(4000, labels.shape, generator=chance), labels)
        return sample

    module.GPTDataset.__getitem__ = __getitem__


@after_import("mt_resilient.training.state.modules.module_source")
def forget_tensors(module: Any) -> None:
    """Give back the values from before a restoration to the tensors that it is to forget."""
    prepare, restore = module.Modules.prepare, module.Modules.restore

    @functools.wraps(prepare)
    def prepare_and_note(self: Any, described: Any) -> None:
        prepare(self, described)
        self.forgotten = {name: each.detach().clone() for name, each in self.tensors().items() if _forgets(name)}

    @functools.wraps(restore)
    def restore_and_forget(self: Any, kept: Any) -> None:
        restore(self, kept)
        for name, before in getattr(self, "forgotten", {}).items():  # absent if another layout's state is restored
            self.tensors()[name].data.copy_(before)

    module.Modules.prepare, module.Modules.restore = prepare_and_note, restore_and_forget


@after_import("mt_resilient.training.state.rng")
def forget_streams(module: Any) -> None:
    restore = module.Randomness.restore

    @functools.wraps(restore)
    def restore_and_forget(self: Any, kept: Any) -> None:
        live = {name: state for name, state in module._tracker_states().items() if _forgets(name)}
        restore(self, {**kept, "tracker": {**kept["tracker"], **live}})

    module.Randomness.restore = restore_and_forget


def _forgets(name: str) -> bool:
    what = os.environ.get("NEMESIS_FORGETS")
    return bool(what) and str(what) in name


# ----------------------------------------------------------------------------------------------------------------- record


def _tensors(model: list[Any], optimizer: Any) -> Iterator[Any]:
    """Parameters, buffers, then of every inner optimizer its parameters (fp32 mains, where there are any) and their state."""
    for chunk in model:
        yield from chunk.parameters()
        yield from chunk.module.buffers()  # DistributedDataParallel's own `buffers` is something else
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for param in group["params"]:
                state = part.optimizer.state[param]
                yield param
                yield from (state[key] for key in sorted(state) if hasattr(state[key], "detach"))


def _write_digest(model: list[Any], optimizer: Any) -> None:
    import torch

    prefix = os.environ.get("NEMESIS_DIGEST")
    if prefix is None:
        return
    digest = hashlib.sha256()
    for tensor in _tensors(model, optimizer):
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    with open(f"{prefix}.{_rank()}", "w") as file:
        file.write(digest.hexdigest() + "\n")


def _write_losses(iteration: int, loss: Any, grad_norm: Any) -> None:
    prefix = os.environ.get("NEMESIS_LOSSES")
    if prefix is None:
        return
    # Only the last pipeline stage has a loss.
    loss_bits = "-" if loss is None else loss.detach().float().cpu().numpy().tobytes().hex()
    with open(f"{prefix}.{_rank()}", "a") as file:
        file.write(f"{iteration} {loss_bits} {None if grad_norm is None else float(grad_norm)!r}\n")


def _wrap(module: Any, iteration_of: Callable[[dict[str, Any]], int]) -> None:
    """Wrap `train_step` and `train` of a loop; `iteration_of(arguments of train_step)` is the 0-based step being computed."""
    train_step, train = module.train_step, module.train
    step_signature, train_signature = inspect.signature(train_step), inspect.signature(train)

    @functools.wraps(train_step)
    def recorded_step(*args: Any, **kwargs: Any) -> Any:
        global _iteration
        _iteration = iteration_of(step_signature.bind(*args, **kwargs).arguments) + 1
        try:
            result = train_step(*args, **kwargs)
        finally:
            iteration, _iteration = _iteration, None
        _write_losses(iteration, result[0].get("lm loss"), result[2] if len(result) == 4 else result[5])
        return result

    @functools.wraps(train)
    def recorded_train(*args: Any, **kwargs: Any) -> Any:
        bound = train_signature.bind(*args, **kwargs).arguments
        try:
            result = train(*args, **kwargs)
        except SystemExit:
            _write_digest(bound["model"], bound["optimizer"])
            raise
        _write_digest(bound["model"], bound["optimizer"])
        return result

    module.train_step, module.train = recorded_step, recorded_train


@after_import("megatron.training.training")
def megatron_lm(module: Any) -> None:
    """`curr_iteration` is set by the loop right before every step, so it is right after a rewind too."""
    _wrap(module, lambda arguments: module.get_args().curr_iteration)


@after_import("megatron.bridge.training.train")
def megatron_bridge(module: Any) -> None:
    _wrap(module, lambda arguments: arguments["global_state"].train_state.step)
