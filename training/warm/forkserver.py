"""The warm process: a rank's own interpreter, stopped at its start, from which launchers and ranks are forked.

    agent ──one JSON line per launch──▶ warm ──fork──▶ launcher (torchrun) ──fork, at its start──▶ rank, rank, …

The agent starts the warm process with a rank's command line. The process stops inside `site`, before Python runs the script, and runs the
script's opening (its first imports) there. In a forked rank, `serve` returns. Python itself then runs the script, from its first line to
the exit code. The launcher forks its ranks first, before it creates any store, socket or thread. Each forked process waits until torchrun's
own code starts a rank, and then receives that rank's environment.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...resilience.clock import wall_s
from ...resilience.ipc.die_with_parent import die_with_parent
from ...resilience.ipc.file_descriptors import high
from ...resilience.ipc.process_title import show
from . import unseeded
from .captured_output import Printed, print_again
from .preload import preload, version

VARIABLE = "MT_RESILIENT_WARM"
NAME = "mt-warm"
"""The warm process's name in `ps`."""
_NAME = Path("/proc/self/comm")
_LENGTH = struct.Struct("<Q")
Waiting = tuple[int, socket.socket]
"""A process that waits to become a rank: its pid, and the socket that carries the launcher's order."""


def serve(site: Callable[[], None]) -> None:
    """Serve the agent; return only in a forked rank. site: the function that a rank runs before the script.

    An environment variable contains the plan: the descriptors `channel` to the agent and `log`, the `agent`'s pid, and the arguments of
    `preload`. `modules` is the file that lists the modules imported by ranks; without it, only launchers are forked."""
    plan = json.loads(os.environ.pop(VARIABLE))
    name = _NAME.read_bytes().rstrip(b"\n")
    _NAME.write_bytes(NAME.encode())
    channel = socket.socket(fileno=high(plan["channel"]))
    streams = {number: os.dup(number) for number in (1, 2)}
    streams = {number: high(copy) for number, copy in streams.items()}
    log = high(plan["log"])
    recording = Printed(log)
    os.close(log)
    path = list(sys.path)
    words = _prepare(plan, site, terminal=any(map(os.isatty, streams.values())))
    sys.path[:] = [*path, *words.get("path", [])]
    printed = recording.end()
    files = words.pop("files", {})
    _say(channel, words)
    for line in channel.makefile(encoding="utf-8"):
        order = json.loads(line)
        if changed := next((file for file, seen in files.items() if version(file) != seen), ""):
            _say(channel, {"stale": changed})
        elif environment := _launch(order, channel, streams, plan["agent"], ranks="modules" in plan):
            _NAME.write_bytes(name)
            _refresh(environment, words.get("environment", {}))
            print_again(printed)
            return
    os._exit(0)


def _prepare(plan: Mapping[str, Any], site: Callable[[], None], *, terminal: bool) -> dict[str, Any]:
    """Run the imports ahead of time. Return the report for the agent: whether the process is `ready`; if not, the reason (`why`) and the
    limits for another try (`less`)."""
    words: dict[str, Any] = {"ready": True}
    if "modules" in plan:
        noted, complete = Path(plan["modules"]), plan.get("complete", True)
        with unseeded.noted():
            words = preload(site, noted, plan.get("until"), complete=complete, terminal=terminal)
    if words["ready"]:
        importlib.import_module("torch.distributed.run")  # for the launchers
    gc.collect()
    gc.freeze()  # children share these pages; a garbage collection would copy them
    return words


def _say(channel: socket.socket, words: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(words).encode() + b"\n")


def _launch(
    order: Mapping[str, Any], channel: socket.socket, streams: dict[int, int], agent: int, *, ranks: bool
) -> dict[str, str] | None:
    """Fork a launcher. Return None in this process. In each rank that the launcher forks, return the rank's environment.

    order: `program` and `argv` (torchrun's command line), `env` (the whole environment), `cwd`, the number of `ranks`."""
    if not _fork_for(agent):
        return None
    try:
        _say(channel, {"launcher": os.getpid()})
        os.close(channel.detach())
        waiting: list[Waiting] = []
        for _ in range(order["ranks"] if ranks else 0):
            requests = _fork_rank(waiting)
            if requests:
                return _become_rank(requests, streams)
        _put(streams, streams)
        from . import forked_launcher as torchrun

        code = torchrun.run(order, waiting)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


def _fork_rank(waiting: list[Waiting]) -> socket.socket | None:
    """Fork a process that will become a rank, and add it to `waiting`. Return None in this process. In the forked process, return the
    socket for the order."""
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        waiting.append((pid, ours))
        return None
    die_with_parent(launcher)
    os.setsid()
    for other in (ours, *(channel for _, channel in waiting)):
        other.close()
    return theirs


def _fork_for(parent: int) -> bool:
    """Fork a child of the process `parent`, an ancestor that adopts orphans. Return True in the child. The child has its own session, and
    ends when `parent` ends. This function forks twice: the process in between ends immediately, so `parent` adopts the child."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return False
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while (now := os.getppid()) != parent:  # until `parent` has adopted this process
        if now != middle:
            os._exit(1)
        time.sleep(0.0002)
    die_with_parent(parent)
    os.setsid()
    return True


def _put(streams: Mapping[int, int], spare: Mapping[int, int]) -> None:
    """Make `streams` this process's stdout and stderr, and close the descriptors that `streams` and `spare` contain."""
    for number, descriptor in streams.items():
        os.dup2(descriptor, number, inheritable=True)
    for descriptor in {*streams.values(), *spare.values()}:
        os.close(descriptor)


def _become_rank(requests: socket.socket, streams: Mapping[int, int]) -> dict[str, str]:
    """Wait until torchrun starts this rank, and return the rank's environment. The order brings files for the rank's stdout and stderr,
    unless it uses the launcher's. If the launcher closes the socket without an order, this process exits."""
    head, files, _, _ = socket.recv_fds(requests, _LENGTH.size, 2)
    if not head:
        os._exit(0)
    (length,) = _LENGTH.unpack(head)
    with requests, requests.makefile("rb") as stream:
        text = stream.read(length)
    if len(text) < length:
        os._exit(0)
    order = json.loads(text)
    _put({**streams, **dict(zip(order["streams"], files, strict=True))}, streams)
    _ignore(set(order["ignored"]))
    return dict(order["env"])


def _ignore(ignored: set[int]) -> None:
    """Ignore exactly these signals. A launcher sets handlers for some signals that were ignored when it started. Programs that the launcher
    executes would therefore not ignore these signals."""
    for number in signal.valid_signals():
        now = signal.getsignal(number)
        if number in ignored:
            signal.signal(number, signal.SIG_IGN)
        elif now == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _refresh(environment: Mapping[str, str], changed: Mapping[str, str | None]) -> None:
    """Set what a fresh interpreter would have anew: the environment, random seeds from the system, the start time. changed: variables that
    the imports here have set, or removed (None)."""
    os.environ.clear()
    os.environ.update(environment)
    show(None, environment)
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty())  # type: ignore[union-attr]
    gc.unfreeze()
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    unseeded.draw_anew()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "logging" in sys.modules:
        sys.modules["logging"]._startTime = wall_s()  # type: ignore[attr-defined]
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"]
        process.current_process().authkey = os.urandom(32)
    if "threading" in sys.modules:
        sys.modules["threading"].main_thread()._set_native_id()


def start_rank(requests: socket.socket, environment: Mapping[str, str], streams: Mapping[int, Any]) -> None:
    """From the launcher, order a waiting process to become this rank. Raises OSError if that process has ended."""
    ignored = [number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN]
    order = json.dumps({"env": dict(environment), "streams": list(streams), "ignored": ignored}).encode()
    with requests:
        socket.send_fds(requests, [_LENGTH.pack(len(order))], [stream.fileno() for stream in streams.values()])
        requests.sendall(order)
