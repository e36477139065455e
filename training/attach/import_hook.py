"""Attaches a rank without any change to its code: waits until the script imports a supported training loop, and wraps the loop.

After a loop's module is executed, its wrapper is installed. Other programs' hooks on the same modules keep working, in either order.
"""

from __future__ import annotations

import _thread
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from ...resilience import clock  # noqa: F401  (before the script can replace the functions of `time`)

LOOPS = {
    "megatron.training.training": "mt_resilient.training.loops.megatron_entry",
    "megatron.training.initialize": "mt_resilient.training.loops.megatron_alike",
    "megatron.bridge.training.pretrain": "mt_resilient.training.loops.megatron_bridge",
}
"""Module of a training loop → this program's module whose `wrap(module)` installs the hooks."""
_EARLY = "mt_resilient.training.snapshot.early_memory"
"""Loaded only if the warm process has imported it with the script's loop."""


def activate() -> None:
    """Attach this rank and prepare the hooks. Each process of the rank calls `activate`, because only the training loop shows which process
    trains. Workers of multiprocessing are not attached, nor are further interpreters of a process (known from Python 3.13 on)."""
    if not getattr(_thread, "_is_main_interpreter", lambda: True)():
        return
    _turn_a_deaf_ear()
    if any(word.startswith("from multiprocessing.") for word in sys.orig_argv):
        return
    if os.getsid(0) == os.getpid():  # otherwise the launcher has not started this process
        _attach()
    for name in LOOPS:
        if name in sys.modules:  # this process was forked from one that had imported the module
            _wrap(sys.modules[name])
    if not any(isinstance(finder, LoopFinder) and finder.wraps.keys() == LOOPS.keys() for finder in sys.meta_path):
        sys.meta_path.insert(0, LoopFinder(dict.fromkeys(LOOPS, _wrap)))


def _attach() -> None:
    from .attach import attach  # the import takes 0.1 s, which a rank's child processes need not pay

    attached = attach(trains=False)
    if attached and attached.handoff.generation > 1:  # each generation's own torchrun counts from 0
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attached.handoff.generation - 1)
    os.environ.update(attached.handoff.variables if attached else {})
    if attached and attached.handoff.resume_step >= 0 and _EARLY in sys.modules:
        sys.modules[_EARLY].begin(attached)


def _turn_a_deaf_ear() -> None:
    """If SIGUSR1 and SIGUSR2 are ignored, handle them with a function that does nothing. A scheduler may send them to all processes, though
    they are meant for the agent. The launcher ignores them, and each program that a rank starts would inherit this. A program does not
    inherit a handler."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)


def listen_to_launcher() -> None:
    """Make this process, which is torchrun itself, report how its ranks end."""
    from . import launcher_report

    sys.meta_path.insert(0, LoopFinder({launcher_report.MODULE: launcher_report.wrap}))


def _wrap(module: ModuleType) -> None:
    """Install the hooks, without ever disturbing the import: a module of another version may lack any name."""
    try:
        importlib.import_module(LOOPS[module.__name__]).wrap(module)
    except Exception as error:
        from .unknown_loop import tell_unknown

        tell_unknown(module.__name__, error)


class LoopFinder(importlib.abc.MetaPathFinder):
    """Asks all other finders for the modules to wrap, and extends these modules' loaders. LoopFinder finds no module itself."""

    def __init__(self, wraps: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.wraps = wraps
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.wraps or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.wraps[fullname](module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except (AttributeError, TypeError):  # the loader takes no attributes: the script runs unwatched
            return None
        return spec
