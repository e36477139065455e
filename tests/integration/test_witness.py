"""What an agent sees of its ranks from outside, with real processes: they answer with their stacks, and nobody dies of the question."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mt_resilient.agent.monitor.stack_sampler import Witness, _catches
from mt_resilient.agent.ranks.worker_group import Watched
from mt_resilient.resilience.detect.hang_rules import BUSY_BYTES, HangPolicy, Look, compare
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.signals import Place

POLICY = HangPolicy(idle_s=0.1)
RANK = """
import ctypes, mmap, os, signal, sys, time
from mt_resilient.resilience.ipc.board_layout import PAGE_BYTES, Page
from mt_resilient.training.attach.stack_signal import listen
board, stacks, how = sys.argv[1:]
page = Page(memoryview(mmap.mmap(os.open(board, os.O_RDWR), PAGE_BYTES)))
listen(page, stacks)
def sleeps():
    time.sleep(1000)
def holds_the_gil():
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
def prints():
    while True:
        print("x" * 1000)
def computes():
    while True:
        sum(range(1000))
def has_a_child_that_writes():
    if os.fork():
        time.sleep(1000)
    empty = os.open("/dev/zero", os.O_WRONLY)
    while os.getppid() == page.pid:
        os.write(empty, bytes(1 << 20))
        time.sleep(0.02)
    os._exit(0)
def becomes_another_program():
    os.execvp("sleep", ["sleep", "1000"])
def unlearns():
    signal.signal(page.listens, signal.SIG_DFL)
    time.sleep(1000)
page.pid = os.getpid()
globals()[how]()
"""


def until(is_so: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


class Rank:
    def __init__(self, place: Path, how: str) -> None:
        self.page = Page(memoryview(bytearray(PAGE_BYTES)))
        board = os.memfd_create("board")
        os.ftruncate(board, PAGE_BYTES)
        self.witness = Witness(1, place)
        words = [f"/proc/{os.getpid()}/fd/{board}", self.witness.paths[0], how]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, *words], stdout=subprocess.PIPE
        )  # which nobody reads
        self.watched = Watched(self.process.pid, os.pidfd_open(self.process.pid))

        def begun() -> bool:
            self.page.raw[:] = os.pread(board, PAGE_BYTES, 0)
            return bool(self.page.pid)

        until(begun)

    def look(self) -> Look:
        self.witness.ask(0, self.page, self.watched)
        time.sleep(0.3)
        return self.witness.take(0, self.page, self.watched, time.monotonic())

    def seen(self, there: Callable[[Look], bool]) -> Look:
        """Look until it is there, and has answered: either may take long on a busy machine."""
        ends = time.monotonic() + 60
        while not there(look := self.look()):
            assert time.monotonic() < ends, look
        return look

    def twice(self, there: Callable[[Look], bool]) -> tuple[Look, tuple[bool, bool, str]]:
        first, second = self.seen(there), self.seen(there)
        assert self.process.poll() is None, "it has died of being asked"
        return second, compare(first, second, 1.0, POLICY)


@contextmanager
def rank(place: Path, how: str) -> Iterator[Rank]:
    one = Rank(place, how)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


@pytest.mark.parametrize("how", ["sleeps", "holds_the_gil"])
def test_one_that_hangs_tells_where(how: str, tmp_path: Path) -> None:
    with rank(tmp_path, how) as one:
        look, found = one.twice(lambda look: bool(look.stack) and look.stack[0].function == how and look.state == "S")
        assert found[:2] == (False, False)

        def kept() -> Path:
            return Path(one.witness.keep("g1-step7", {0: look}))

        assert kept().parent == tmp_path
        until(lambda: kept().exists() and how in kept().read_text())


def test_one_that_computes_is_busy(tmp_path: Path) -> None:
    with rank(tmp_path, "computes") as one:
        _, (moved, busy, _) = one.twice(lambda look: look.stack is not None)
        assert moved or busy


def test_one_whose_child_writes_is_busy(tmp_path: Path) -> None:
    """As a save in a process of its own. The child uses little of a processor."""
    with rank(tmp_path, "has_a_child_that_writes") as one:
        first = one.look()
        one.seen(lambda look: look.io_bytes - first.io_bytes > BUSY_BYTES)


def test_one_whose_output_nobody_reads_does_not_hang(tmp_path: Path) -> None:
    with rank(tmp_path, "prints") as one:
        _, found = one.twice(
            lambda look: (look.state, look.spot.place, bool(look.person)) == ("S", Place.ELSEWHERE, True)
        )
        assert found == (True, False, "it waits until its output is read")


def test_one_that_is_stopped_cannot_answer_and_that_says_enough(tmp_path: Path) -> None:
    with rank(tmp_path, "sleeps") as one:
        os.kill(one.process.pid, signal.SIGSTOP)
        look, found = one.twice(lambda look: look.state == "T")
        assert (look.spot.place, found[:2]) == (Place.HALTED, (False, False))


@pytest.mark.parametrize("how", ["becomes_another_program", "unlearns"])
def test_one_that_does_not_listen_any_more_is_not_asked(how: str, tmp_path: Path) -> None:
    with rank(tmp_path, how) as one:
        until(lambda: not _catches(one.process.pid, one.page.listens))
        look, _ = one.twice(bool)
        assert (look.stack, look.spot.place) == (None, Place.PERHAPS)


def test_one_that_is_gone_is_not_there(tmp_path: Path) -> None:
    with rank(tmp_path, "sleeps") as one:
        one.process.kill()
        one.process.wait()
        one.witness.ask(0, one.page, one.watched)
        look = one.witness.take(0, one.page, one.watched, 1.0)
        assert (look.state, look.spot.place) == ("", Place.HALTED)


def test_before_a_rank_is_there_its_launcher_is_looked_at(tmp_path: Path) -> None:
    with rank(tmp_path, "computes") as launcher:
        launcher.page.pid = 0
        look, (moved, busy, _) = launcher.twice(bool)
        assert (look.stack, look.spot.place, moved, busy) == (None, Place.HALTED, False, True)


@pytest.mark.parametrize(
    "code", ["input()", "import pdb; pdb.set_trace()", "import time; print(flush=True); time.sleep(600)"]
)
def test_one_that_waits_for_a_person(code: str, tmp_path: Path) -> None:
    keyboard, terminal = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=terminal, stdout=terminal, stderr=terminal)
    page, witness = Page(memoryview(bytearray(PAGE_BYTES))), Witness(1, tmp_path)
    try:
        if "sleep" in code:
            os.read(keyboard, 1)  # it has begun
        person = "" if "sleep" in code else "it waits for input from a terminal"
        until(lambda: witness.take(0, page, Watched(process.pid, -1), 1.0).person == person)
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
        os.close(terminal)


def test_what_is_kept_does_not_pile_up(tmp_path: Path) -> None:
    witness = Witness(1, tmp_path)
    for name in (f"g1-step{number}" for number in range(30)):
        until(lambda name=name: Path(witness.keep(name, {})).exists())
    until(lambda: len(list(tmp_path.glob("stacks-*.txt"))) == 20)
