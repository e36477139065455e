"""The forked launcher: runs torchrun's own code in this process. Forked ranks replace the interpreters that torchrun would start."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from ...resilience.ipc.process_title import show
from ..attach import launcher_report
from .forkserver import Waiting, start_rank


def run(order: Mapping[str, Any], waiting: list[Waiting]) -> int:
    """Do what `torchrun` does with `order["argv"]`; return its exit code. waiting: this launcher's forked ranks. If no rank was forked,
    torchrun starts the ranks."""
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    atexit._clear()  # these handlers come from the ranks' imports, and only ranks may call them
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    if waiting:
        start = SubprocessHandler._popen

        def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> Any:
            # If the command is not this process's own command line (numactl, for example), torchrun starts it.
            forked = waiting and list(args) == sys.orig_argv
            return Fork(waiting.pop(0), env, handler) if forked else start(handler, args, env)

        SubprocessHandler._popen = popen  # type: ignore[method-assign]
    if torch.cuda.is_available.__module__ == torch.cuda.__name__:
        # torchrun calls this function. torch's own opens the devices, which takes 0.3 to 0.4 s. Counting devices does not open them.
        torch.cuda.is_available = lambda: torch.cuda.device_count() > 0
    launcher_report.wrap(api)
    program = order["program"]
    sys.argv = [program[-1], *order["argv"]]
    show([*([sys.executable] if len(program) == 1 else program[:-1]), *sys.argv], order["env"])
    try:
        run.main(order["argv"])
        return 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        inner = error.__traceback__.tb_next if error.__traceback__ else None  # the traceback without this function
        sys.excepthook(type(error), error.with_traceback(inner), inner)
        return 1
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


class Fork:
    """A forked rank, with the part of `subprocess.Popen`'s interface that torchrun uses."""

    def __init__(self, waiting: Waiting, environment: dict[str, str], handler: Any) -> None:
        self.args = sys.orig_argv
        self.returncode: int | None = None
        streams = {number: stream for number, stream in ((1, handler._stdout), (2, handler._stderr)) if stream}
        self.pid, requests = waiting
        start_rank(requests, environment, streams)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
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
