"""The warm process: has imported torch and the script's libraries, never touched a device, and forks the next gang.

    agent ──one JSON line per launch──▶ forkserver ──fork, fork──▶ torchrun's own machinery ──fork──▶ ranks

The launcher runs `torch.distributed.run` itself, so that every torchrun flag keeps its meaning; only the last link is ours: where
torchrun would start an interpreter for a rank, it forks, and the child becomes the script. The launcher is forked twice, so that it is
the agent's child (a child subreaper) and neither outlives the agent nor dies with this process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..resilience.leash import die_with_parent
from . import device


def main(channel_fd: int, streams: tuple[int, int], agent_pid: int, modules: Path) -> None:
    """Import what `modules` (a JSON list of names) names, say so on the channel, then fork a gang for each line that arrives.

    streams: the descriptors that gangs have as stdout and stderr; this process's own are its log.
    """
    channel = socket.socket(fileno=channel_fd)
    numpy_threads = _threads_after_numpy()
    with _devices_counted_in_dev():
        failed = _import_all(**json.loads(modules.read_text()))
    gc.collect()
    gc.freeze()  # the children share these pages; a collection would copy them
    why = _unsafe(numpy_threads)
    _say(channel, {"ready": not why, "why": why, "failed_imports": failed[:5]})
    if why:
        return
    for line in channel.makefile():
        _fork_launcher(json.loads(line), channel, streams, agent_pid)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_after_numpy() -> int:
    """OpenBLAS starts its pool when numpy is imported and stops it at a fork (pthread_atfork): those threads are no obstacle."""
    importlib.import_module("numpy")
    return _threads()


def _import_all(path: str, modules: Sequence[tuple[str, str]]) -> list[str]:
    """path: the script's own first place to look; modules: name and origin, as the ranks had them. Those that would come from elsewhere
    here, or that only the script's own setup makes importable, are left to the ranks."""
    sys.path[0] = path
    importlib.import_module("torch.distributed.run")
    failed = []
    for name, origin in modules:
        try:
            spec = sys.modules[name].__spec__ if name in sys.modules else importlib.util.find_spec(name)
            if spec is not None and str(spec.origin) == origin:
                importlib.import_module(name)
        except BaseException:  # whatever a module may do when it is imported without its script, SystemExit included
            failed.append(name)
    return failed


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
        code = _exit_code(error)
    _leave(code)


def _become(environment: dict[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)


def _launch(arguments: Sequence[str]) -> int:
    """What `torchrun` does, with ranks that are forked."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = _popen  # type: ignore[assignment, method-assign]
    sys.argv = ["torchrun", *arguments]
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
    _undo.append(lambda: setattr(torch.cuda, "is_available", original))
    yield
    _undo.pop()()


_undo: list[Callable[[], None]] = []
"""What a forked rank takes back first."""


def _popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
    """In place of `SubprocessHandler._popen`: fork where it would start our own interpreter on a script."""
    rest = list(args[1:])
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    if os.path.realpath(args[0]) != os.path.realpath(sys.executable) or not rest:
        streams = {"stdout": handler._stdout, "stderr": handler._stderr}
        return subprocess.Popen(args, env=env, start_new_session=True, **streams)
    return Fork(rest, env, handler._stdout, handler._stderr)


class Fork:
    """A forked rank, as far as torchrun's use of `subprocess.Popen` goes."""

    def __init__(self, command: list[str], env: dict[str, str], stdout: Any, stderr: Any) -> None:
        self.args = command
        self.returncode: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                die_with_parent(parent)
                for stream, number in ((stdout, 1), (stderr, 2)):
                    if stream is not None:
                        os.dup2(stream.fileno(), number)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))
                code = _run_rank(command, env)
            except BaseException as error:
                code = _exit_code(error)
            _leave(code)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if timeout is None:
            code = self._wait(0)
            return code if code is not None else 0
        for _ in range(max(1, int(timeout / 0.01))):
            if (code := self._wait(os.WNOHANG)) is not None:
                return code
            time.sleep(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)

    def _wait(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _run_rank(command: list[str], env: dict[str, str]) -> int:
    """Become `python -u <command>` with environment `env`, as if freshly started."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    gc.unfreeze()
    while _undo:
        _undo.pop()()
    from . import hook

    hook.activate()
    try:
        if command[0] == "-m":
            sys.argv = [command[1], *command[2:]]
            sys.path[0] = os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            _run_script(command[0])
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        return _exit_code(error)
    return 0


def _run_script(path: str) -> None:
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    main_module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    exec(compile(Path(path).read_bytes(), path, "exec"), main_module.__dict__)


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _leave(code: int) -> None:
    """End like an interpreter would, without running the destructors of what was inherited from the process forked from."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


if __name__ == "__main__":
    main(int(sys.argv[1]), (int(sys.argv[2]), int(sys.argv[3])), int(sys.argv[4]), Path(sys.argv[5]))
