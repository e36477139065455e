"""Injects faults from inside a rank, at the rank's next optimizer step, when `mt-resilient chaos` orders it.

An order is a file `rank-N` in the folder of orders, which holds the fault's name. The rank takes it by renaming the file. If the rank has
nothing for the fault to strike, it deletes the file and writes the reason to `rank-N.refused`. Each fault is a function of `FAULTS`; its
docstring is what `mt-resilient chaos --list` says. Only `mt-resilient chaos` loads this module into a rank.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...resilience.clock import monotonic_s, sleep
from ...training.attach.import_hook import LoopFinder

VARIABLE = "MT_RESILIENT_CHAOS"
"""Environment variable with `folder` (of the orders) and `delay_s` (for which each optimizer step is held up), in JSON."""
STARTS = "starts"
"""The order that the next start of the script fails: a file with the number of starts."""
SPIKE = "spike_by_data"
NOT_ALONE = ("deadlock", "other_collective")
"""Faults that only a rank with other ranks can have."""
REFUSED = ".refused"
_BAD = "bad-batches"
"""The file with the numbers of the batches that are bad, a line each."""
_AHEAD = 3
"""How many batches later the bad one comes, so that each rank knows of it."""
_HARM = -6.0
"""What a bad batch multiplies the parameters by."""
SLOW_S = 6.0
_SLOW_STEP_S = 0.5
_FOR_EVER_S = 10_000
_EXTRA_BYTES = 256 << 20
_slow_until_s = 0.0
_sessions: list[Any] = []


def install() -> None:
    """Have each optimizer step look for an order, from the moment at which torch's optimizers are imported."""
    sys.meta_path.insert(0, LoopFinder({"torch.optim.optimizer": _wrap, "mt_resilient.training.session": _find}))


def _find(module: ModuleType) -> None:
    """Have each Session of the script found."""
    construct = module.Session.__init__

    def __init__(self: Any, **sources: Any) -> None:
        construct(self, **sources)
        _sessions.append(self)

    module.Session.__init__ = __init__


def _wrap(module: ModuleType) -> None:
    order = json.loads(os.environ[VARIABLE])
    folder, delay_s = Path(order["folder"]), float(order["delay_s"])
    construct = module.Optimizer.__init__

    def __init__(self: Any, *args: Any, **words: Any) -> None:
        _start(folder / f"{STARTS}-{os.environ.get('RANK')}")
        construct(self, *args, **words)

    def before_step(optimizer: Any, *_: object) -> None:
        if delay_s:
            sleep(delay_s)
        if monotonic_s() < _slow_until_s:
            sleep(_SLOW_STEP_S)
        _obey(folder / f"rank-{os.environ.get('RANK')}", optimizer)
        _use(folder / _BAD, optimizer)

    module.Optimizer.__init__ = __init__
    module.register_optimizer_step_pre_hook(before_step)


def _start(order: Path) -> None:
    if order.exists():
        left = int(order.read_text()) - 1
        order.write_text(str(left)) if left else order.rename(order.with_suffix(".taken"))
        raise ImportError(
            "libchaos.so: cannot open shared object file: Stale file handle (a fault of mt-resilient chaos)"
        )


def _obey(order: Path, optimizer: Any) -> None:
    if order.exists():
        name = order.read_text()
        if why_not := _why_not(name, optimizer):
            order.with_suffix(REFUSED).write_text(why_not)
            order.unlink()
        else:
            order.rename(order.with_suffix(".taken"))
            FAULTS[name](optimizer)


def _why_not(name: str, optimizer: Any) -> str:
    """Return what the fault has not found to strike here; empty: it can strike."""
    if name in _STRIKES and next(_STRIKES[name](optimizer), None) is None:
        return f"the optimizer has no {name.rpartition('_')[2]} with an element on this rank"
    if name in NOT_ALONE:
        distributed = sys.modules["torch"].distributed
        if not distributed.is_initialized() or distributed.get_world_size() == 1:
            return "the rank has no other rank to talk to"
    return "the number of the next batch is not known" if name == SPIKE and _batch() < 0 else ""


def _use(bad: Path, optimizer: Any) -> None:
    """Do what a bad batch does, if this step uses one."""
    if bad.exists() and str(_batch()) in bad.read_text().split():
        torch = sys.modules["torch"]
        with torch.no_grad():
            for parameter in _parameters(optimizer):
                parameter.mul_(_HARM)


def _batch() -> int:
    """Return the number of the batch that the present step uses; -1: it is not known."""
    session = _sessions[-1] if _sessions else None
    return -1 if session is None or session.fixed_data else int(session.data_step)


def spike_by_data(optimizer: Any) -> None:
    """A batch is bad, each time that it comes: it spoils the parameters of all ranks, and the loss diverges. The ranks must leave it out.
    The final state is compared with that of a run without faults that leaves out the same data."""
    with (Path(json.loads(os.environ[VARIABLE])["folder"]) / _BAD).open("a") as file:
        file.write(f"{_batch() + _AHEAD}\n")


def nan_in_gradient(optimizer: Any) -> None:
    """A gradient of one rank becomes NaN in one element, right before the optimizer step."""
    _first(next(_gradients(optimizer))).fill_(float("nan"))


def inf_in_gradient(optimizer: Any) -> None:
    """A gradient of one rank becomes infinite in one element, right before the optimizer step."""
    _first(next(_gradients(optimizer))).fill_(float("inf"))


def bit_in_parameter(optimizer: Any) -> None:
    """A high bit of one parameter of one rank flips. Only copies of the parameter on other ranks show it."""
    _flip(next(_parameters(optimizer)))


def bit_in_gradient(optimizer: Any) -> None:
    """A high bit of one gradient of one rank flips, after the gradients are reduced. Only other ranks' copies show it."""
    _flip(next(_gradients(optimizer)))


def bit_in_moment(optimizer: Any) -> None:
    """A high bit of the optimizer's moment of one parameter flips on one rank. Only other ranks' copies show it."""
    _flip(next(_moments(optimizer)))


def raises(optimizer: Any) -> None:
    """The script raises an exception on one rank."""
    raise RuntimeError("a fault of mt-resilient chaos: this exception")


def exits(optimizer: Any) -> None:
    """One rank's process exits with code 17, without a word."""
    os._exit(17)


def memory_exhausted(optimizer: Any) -> None:
    """One rank may have no more memory (RLIMIT_AS), and asks for more: MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _EXTRA_BYTES, limits[1]))
    bytearray(2 * _EXTRA_BYTES)


def sleeps(optimizer: Any) -> None:
    """One rank sleeps in the script's own code and never wakes, as if it waited for a lock or for storage."""
    sleep(_FOR_EVER_S)


def loops_for_ever(optimizer: Any) -> None:
    """One rank computes without end at one place of the script's own code: the stand-in for an endless kernel."""
    any(False for _ in itertools.repeat(None))  # in one line, because a rank whose stack changes is taken to move


def deadlock(optimizer: Any) -> None:
    """One rank waits in a receive that no other rank answers, while the others train on."""
    torch, rank = sys.modules["torch"], int(os.environ["RANK"])
    missing = torch.zeros(1, device=_device(torch, optimizer))
    torch.distributed.recv(missing, src=(rank + 1) % int(os.environ["WORLD_SIZE"]), tag=4711)


def other_collective(optimizer: Any) -> None:
    """One rank calls a collective that the others do not call: all of them wait, or fail."""
    torch = sys.modules["torch"]
    device = _device(torch, optimizer)
    torch.distributed.broadcast(torch.zeros(11, device=device), src=int(os.environ["RANK"]))
    torch.distributed.all_reduce(torch.zeros(7, device=device))


def _device(torch: Any, optimizer: Any) -> Any:
    """Return the device whose tensors the ranks exchange: the CPU with gloo, else that of the parameters."""
    if "gloo" in torch.distributed.get_backend():
        return "cpu"
    return next(
        (p.device for group in optimizer.param_groups for p in group["params"] if p.device.type != "cpu"), "cpu"
    )


def holds_the_gil(optimizer: Any) -> None:
    """One rank is stuck in C code that holds Python's lock (GIL), so that none of its threads runs."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)  # unlike a sleep, no signal interrupts it


def slow(optimizer: Any) -> None:
    """One rank is slow: each of its steps takes 0.5 s more, for 6 s. Nothing may restart because of it."""
    global _slow_until_s
    _slow_until_s = monotonic_s() + SLOW_S


FAULTS: dict[str, Callable[[Any], None]] = {
    fault.__name__: fault
    for fault in (
        spike_by_data,
        nan_in_gradient,
        inf_in_gradient,
        bit_in_parameter,
        bit_in_gradient,
        bit_in_moment,
        raises,
        exits,
        memory_exhausted,
        sleeps,
        loops_for_ever,
        deadlock,
        other_collective,
        holds_the_gil,
        slow,
    )
}


def _parameters(optimizer: Any) -> Iterator[Any]:
    return _own(each for group in optimizer.param_groups for each in group["params"] if each.requires_grad)


def _gradients(optimizer: Any) -> Iterator[Any]:
    return _own(each.grad for group in optimizer.param_groups for each in group["params"])


def _moments(optimizer: Any) -> Iterator[Any]:
    found = _own(each for state in optimizer.state.values() for each in state.values())
    return (each for each in found if each.numel() > 1)  # a number of steps has one


_STRIKES = {
    "nan_in_gradient": _gradients,
    "inf_in_gradient": _gradients,
    "bit_in_gradient": _gradients,
    "bit_in_parameter": _parameters,
    "bit_in_moment": _moments,
}


def _own(found: Iterable[Any]) -> Iterator[Any]:
    """Return those that are dense tensors with an element on this rank: of a DTensor, the rank's own part."""
    torch = sys.modules["torch"]
    for each in found:
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            part = each.detach()
            part = part.to_local() if hasattr(part, "to_local") else part
            if part.numel():
                yield part


def _first(tensor: Any) -> Any:
    """Return the tensor's first element, as a view. (`reshape` copies a tensor that is not contiguous.)"""
    return tensor[(0,) * tensor.dim()]


def _flip(tensor: Any) -> None:
    """Flip the second highest bit of the tensor's first element: for a floating-point number, of its exponent."""
    first = _first(tensor)
    flipped = first.reshape(1).clone()
    raw = flipped.view(sys.modules["torch"].uint8)
    raw[-1] ^= 0x20
    first.copy_(flipped[0])
