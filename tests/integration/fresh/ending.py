"""A script that leaves in another way in each of its lives, or on each of its ranks, and writes down what goes on while it leaves.

ending.py PLACE WAY…: the WAY of each life, in turn. `trains`: it trains until it is killed. `each`: all ways, each in a child that is
forked here and goes on with the script to its end. What it prints is in PLACE/WAY.out and .err, and what happens in PLACE/WAY.events.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch  # noqa: F401


class Leaves(SystemExit):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Deleted:
    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self, note=os.write, finalizing=sys.is_finalizing) -> None:  # type: ignore[no-untyped-def]
        note(events, f"deleted {self.name}, finalizing {finalizing()}\n".encode())


def say(what: str) -> None:
    os.write(events, f"{what}\n".encode())


def leave_it_all_open() -> None:
    """Whatever an interpreter sees to at its end."""
    import concurrent.futures
    import logging
    import logging.handlers
    import multiprocessing
    import tempfile

    global text, binary, logged, alive, folder, in_generator, cycle, pool
    alive = Deleted("a global")
    weakref.finalize(alive, say, "weakref.finalize")
    atexit.register(say, "exit handler registered first")
    text = open(f"{place}/{way}.text", "w")  # noqa: SIM115
    text.write("a line that nobody flushes\n")
    binary = open(f"{place}/{way}.binary", "wb")  # noqa: SIM115
    binary.write(b"bytes that nobody flushes")
    logged = logging.handlers.MemoryHandler(1000, target=logging.FileHandler(f"{place}/{way}.log"))
    logging.getLogger("probe").addHandler(logged)
    logging.getLogger("probe").warning("kept in memory until the end")
    cycle = Deleted("in a cycle")
    cycle.itself = cycle  # type: ignore[attr-defined]
    sys.kept = Deleted("kept by sys")  # type: ignore[attr-defined]
    folder = tempfile.TemporaryDirectory(dir=place)
    say("temporary directory made")

    def ends():  # type: ignore[no-untyped-def]
        try:
            yield 1
        finally:
            say("generator closed")

    in_generator = ends()
    next(in_generator)

    exits, tasked = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (tasked.wait(), say("thread ended"))).start()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(lambda: (exits.wait(), say("submitted task ran"), tasked.set()))
    reads, writes = os.pipe()
    multiprocessing.get_context("fork").Process(
        target=lambda: (os.read(reads, 1), os.mkdir(f"{place}/{way}.child"))
    ).start()
    threading._register_atexit(lambda: (say("threading's exit handler"), exits.set()))  # type: ignore[attr-defined]
    atexit.register(lambda: (say("exit handler registered last"), os.write(writes, b"1")))
    print("printed without an end of line", end="")
    print("error without an end of line", end="", file=sys.stderr)


def raise_chained() -> None:
    try:
        {}["missing"]
    except KeyError as error:
        try:
            raise ValueError("because of it") from error
        except ValueError:
            raise RuntimeError("while it was handled")  # noqa: B904


def raise_in_a_thread() -> None:
    thread = threading.Thread(target=raise_chained, name="the other")
    thread.start()
    thread.join()


def raise_at_exit() -> None:
    atexit.register(say, "registered before")
    atexit.register(lambda: 1 / 0)
    atexit.register(sys.exit, 4)


def raise_with_open_ends() -> None:
    leave_it_all_open()
    raise ValueError("with all of it open")


def raise_to_a_hook_of_its_own() -> None:
    sys.excepthook = lambda kind, error, trace: print(
        f"hook: {kind.__name__} {error} {trace.tb_lineno}", file=sys.stderr
    )
    raise ValueError("to the hook")


def raise_to_a_hook_that_raises() -> None:
    def hook(*_: object) -> None:
        raise OSError("in the hook")

    sys.excepthook = hook
    raise ValueError("to the hook")


def break_the_pipe() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    print("nobody reads it")


def end_oneself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(10)


def close_stdout() -> None:
    sys.stdout.close()


def become_another() -> None:
    os.execv(sys.executable, [sys.executable, "-c", "import sys; print('another program'); sys.exit(6)"])


def fork_and_leave() -> None:
    child = os.fork()
    if child == 0:
        sys.exit(9)
    say(f"child left with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    sys.exit(8)


def deep() -> None:
    deep()


WAYS: dict[str, tuple[int, Callable[[], object]]] = {
    "end": (0, lambda: None),
    "all open": (0, leave_it_all_open),
    "exit()": (0, lambda: sys.exit()),
    "exit(False)": (0, lambda: sys.exit(False)),
    "exit(256)": (0, lambda: sys.exit(256)),
    "raise in a thread": (0, raise_in_a_thread),
    "raise at exit": (0, raise_at_exit),
    "stdout closed": (0, close_stdout),
    "_exit(0)": (0, lambda: (print("lost"), os._exit(0))),
    "exit(3)": (3, lambda: sys.exit(3)),
    "exit(text)": (1, lambda: sys.exit("a text for the user")),
    "exit(-1)": (255, lambda: sys.exit(-1)),
    "exit(True)": (1, lambda: sys.exit(True)),
    "exit(tuple)": (1, lambda: sys.exit((1, "two"))),
    "exit of its own kind": (7, lambda: (_ for _ in ()).throw(Leaves(7))),
    "raise": (1, raise_chained),
    "raise with all open": (1, raise_with_open_ends),
    "raise group": (1, lambda: (_ for _ in ()).throw(ExceptionGroup("several", [ValueError(1), OSError(2, "two")]))),
    "raise unprintable": (1, lambda: (_ for _ in ()).throw(Unprintable())),
    "raise to own hook": (1, raise_to_a_hook_of_its_own),
    "raise to raising hook": (1, raise_to_a_hook_that_raises),
    "raise deep": (1, deep),
    "import of nothing": (1, lambda: __import__("a_module_that_is_not_there")),
    "compile": (1, lambda: compile("a = = 1\n", "config.py", "exec")),
    "interrupt": (-2, lambda: (_ for _ in ()).throw(KeyboardInterrupt())),
    "SIGINT": (-2, lambda: end_oneself(signal.SIGINT)),
    "_exit(5)": (5, lambda: os._exit(5)),
    "abort": (-6, os.abort),
    "SIGTERM": (-15, lambda: end_oneself(signal.SIGTERM)),
    "SIGHUP": (-1, lambda: end_oneself(signal.SIGHUP)),
    "SIGALRM": (-14, lambda: end_oneself(signal.SIGALRM)),
    "SIGSEGV": (-11, lambda: end_oneself(signal.SIGSEGV)),
    "exec": (6, become_another),
    "fork": (8, fork_and_leave),
    "exit(1<<70)": (255, lambda: sys.exit(1 << 70)),
    "broken pipe": (1, break_the_pipe),
}
"""The exit code that each has under plain torchrun, and what it does."""


def each() -> str:
    """Returns in children only: the way that it is to take. The others' exit codes are in PLACE/codes."""
    codes = {}
    for way in WAYS:
        child = os.fork()
        if child == 0:
            return way
        codes[way] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{place}/codes", "w") as file:
        json.dump(codes, file)
    sys.exit(0)


if __name__ == "__main__":
    place, *ways = sys.argv[1:]
    way = ways[len([name for name in os.listdir(place) if name.startswith("life")])]
    os.mkdir(f"{place}/life of {way}")
    if way == "trains":
        from fresh.training import train

        train(f"{place}/ready")
    if way == "each":
        way = each()
    else:
        time.sleep(0.5)  # of one that dies at once, the agent may not know how
    events = os.open(f"{place}/{way}.events", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    for number, suffix in ((1, "out"), (2, "err")):
        to = os.open(f"{place}/{way}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(to, number)
        os.close(to)
    print("begins")
    WAYS[way][1]()
