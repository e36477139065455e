"""The warm process: has imported torch and the script's libraries, never touched a device, and forks the next gang.

    agent ──one JSON line per launch──▶ forkserver ──fork, fork──▶ torchrun's own machinery ──fork──▶ ranks

The first gang is forked too: from torch alone, where nothing else is known yet, so that launcher and ranks need not each import it.
The launcher runs `torch.distributed.run` itself, so that every torchrun flag keeps its meaning; only the last link is ours: where
torchrun would start an interpreter for a rank, it forks, and the child becomes the script. The launcher is forked twice, so that it is
the agent's child (a child subreaper) and neither outlives the agent nor dies with this process.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..resilience.leash import die_with_parent
from . import device, forked
from .modules import Noted, shadowed


def main(channel_fd: int, streams: tuple[int, int], agent_pid: int, modules: Path, home: str) -> None:
    """Import torch and what ranks have noted in `modules`, if they have, and say so on the channel. Then, for each line that arrives, fork
    a gang, or import what has been noted since.

    streams: the descriptors that gangs have as stdout and stderr; this process's own are its log. home: the folder that is first on the
    ranks' sys.path.
    """
    channel = socket.socket(fileno=channel_fd)
    forked.name_as(None)
    numpy_threads = _threads_after_numpy()
    with _devices_counted_in_dev():
        importlib.import_module("torch.distributed.run")
    fit = _learn(modules, home, numpy_threads, channel)
    orders = channel.makefile()
    while fit and (line := orders.readline()):
        order = json.loads(line)
        if order:
            _fork_launcher(order, channel, streams, agent_pid)
        else:
            fit = _learn(modules, home, numpy_threads, channel)


def _learn(modules: Path, home: str, harmless_threads: int, channel: socket.socket) -> bool:
    """Import what the ranks have noted; whether this process may fork after that, which it says on the channel."""
    known = Noted.read(modules) if modules.exists() else None
    with _devices_counted_in_dev():
        left = known.bring_back() if known else []
    gc.collect()
    gc.freeze()  # the children share these pages; a collection would copy them
    why = _unsafe(harmless_threads) or (known.foreign() if known else shadowed(home))
    _say(channel, {"ready": not why, "why": why, "left_to_the_ranks": left[:5]})
    return not why


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_after_numpy() -> int:
    """OpenBLAS starts its pool when numpy is imported and stops it at a fork (pthread_atfork): those threads are no obstacle."""
    importlib.import_module("numpy")
    return _threads()


def _unsafe(harmless_threads: int) -> str:
    """Why this process must not fork; empty when it may."""
    held = device.touched()
    if held:
        return f"an import has opened the device {held}"
    extra = _threads() - harmless_threads
    if extra > 0:
        return f"an import has started {extra} thread(s)"
    if _poisoned():
        return "an import has asked the driver for its devices, and a forked process may not use them after that"
    return ""


def _poisoned() -> bool:
    """Whether torch refuses the device to a child of this process: tried with a child. Counting devices is enough to cause it."""
    child = os.fork()
    if child == 0:
        bad = [getattr(sys.modules.get(f"torch.{kind}"), "_is_in_bad_fork", bool)() for kind in ("cuda", "musa")]
        os._exit(any(bad))
    return os.waitpid(child, 0)[1] != 0


def _say(channel: socket.socket, words: dict[str, Any]) -> None:
    channel.sendall(json.dumps(words).encode() + b"\n")


def _fork_launcher(order: dict[str, Any], channel: socket.socket, streams: tuple[int, int], agent_pid: int) -> None:
    """order: `argv` (torchrun's arguments), `env` (the whole environment), `cwd`, `generation`."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    if os.fork():
        os._exit(0)
    while os.getppid() != agent_pid:  # until the middle one is gone and the agent has adopted us
        if os.getppid() == 1:
            os._exit(1)
        time.sleep(0.0005)
    try:
        die_with_parent(agent_pid)
        os.setsid()
        _say(channel, {"launcher": os.getpid(), "generation": order["generation"]})
        os.close(channel.detach())
        for stream, number in zip(streams, (1, 2), strict=True):
            os.dup2(stream, number)
            os.close(stream)
        _become(order["env"], order["cwd"])
        code = _launch(order["argv"])
    except BaseException as error:
        code = forked.exit_code(error)
    forked.leave(code)


def _become(environment: dict[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


def _launch(arguments: Sequence[str]) -> int:
    """What `torchrun` does, with ranks that are forked."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = forked.popen  # type: ignore[assignment, method-assign]
    sys.argv = ["torchrun", *arguments]
    forked.name_as([sys.executable, *sys.argv])
    with _no_device_asked_for():
        run.main(list(arguments))
    return 0


@contextmanager
def _devices_counted_in_dev() -> Iterator[None]:
    """While libraries are imported: `torch.cuda.is_available` and `device_count` answered from /dev, without waking the driver, which
    would make this process unfit to fork. (Megatron asks at import.)"""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = sum(name.removeprefix("nvidia").isdigit() for name in os.listdir("/dev"))
    count = len([device for device in visible.split(",") if device]) if visible is not None else present
    names: dict[str, Callable[[], object]] = {"is_available": lambda: count > 0, "device_count": lambda: count}
    originals = {name: getattr(torch.cuda, name) for name in names}
    if torch.backends.cuda.is_built():
        for name, answer in names.items():
            setattr(torch.cuda, name, answer)
    yield
    for name, original in originals.items():
        if getattr(torch.cuda, name) is names[name]:  # a library that has put its own there meant it
            setattr(torch.cuda, name, original)


@contextmanager
def _no_device_asked_for() -> Iterator[None]:
    """The launcher asks whether there is a GPU, to set defaults that public torch does not have; the question alone would keep the
    ranks that it forks from using one. They get the real function back."""
    import torch

    original = torch.cuda.is_available
    torch.cuda.is_available = lambda: False
    forked.undo_first.append(lambda: setattr(torch.cuda, "is_available", original))
    yield
    forked.undo_first.pop()()


if __name__ == "__main__":
    main(int(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])), int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6])
