"""A rank that is forked where torchrun would start an interpreter: from the launcher's handle on it to the script's last exit code."""

from __future__ import annotations

import atexit
import gc
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from setproctitle import getproctitle, setproctitle

from ..resilience.leash import die_with_parent

undo_first: list[Callable[[], None]] = []
"""What a forked rank takes back first."""


def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
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
                code = exit_code(error)
            leave(code)

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


def name_as(command: Sequence[str] | None) -> None:
    """Let `ps` and `pkill -f` see `command`, cut to the room that this program's own arguments have: what lies behind them, the
    environment, is left as it is. None: only look where they are, while the environment is still the one that the kernel knows."""
    os.environ["SPT_NOENV"] = "1"
    if command is None:
        getproctitle()
    else:
        setproctitle(" ".join(command))
    del os.environ["SPT_NOENV"]


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
    while undo_first:
        undo_first.pop()()
    name_as([sys.executable, "-u", *command])
    from . import hook

    hook.activate()
    try:
        if command[0] == "-m":
            sys.argv = [command[1], *command[2:]]
            sys.path[0] = os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path[0] = os.path.dirname(os.path.realpath(command[0]))
            _run_script(command[0])
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, _of_the_script(error.__traceback__))
        return exit_code(error)
    return 0


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Without our own frames at its beginning: as Python itself would show it."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _run_script(path: str) -> None:
    main_module = ModuleType("__main__")
    main_module.__file__ = path
    main_module.__builtins__ = sys.modules["builtins"]  # type: ignore[attr-defined]
    sys.modules["__main__"] = main_module
    exec(compile(Path(path).read_bytes(), path, "exec"), main_module.__dict__)


def exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def leave(code: int) -> None:
    """End like an interpreter would, without running the destructors of what was inherited from the process forked from."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)
