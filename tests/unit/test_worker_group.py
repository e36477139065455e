"""Who of a worker group has ended: real processes, by their pidfds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from mt_resilient.agent.ranks import exit_codes, worker_group
from mt_resilient.agent.ranks.exit_codes import born, exit_code, open_pidfd
from mt_resilient.agent.ranks.worker_group import Watched, WorkerGroup

from ..open_files import open_files


@pytest.fixture
def two() -> Iterator[tuple[int, int]]:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield started[0].pid, started[1].pid
    for each in started:
        each.kill()
        each.wait()


def test_who_has_ended_and_nobody_else(two: tuple[int, int]) -> None:
    launcher, rank = two
    pidfd = open_pidfd(launcher)
    assert pidfd is not None
    group = WorkerGroup(1, Watched(launcher, pidfd), "cold")
    group.adopt(0, rank)
    assert not group.observe()
    os.kill(rank, signal.SIGKILL)
    os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    assert group.observe()
    assert (group.ranks[0].code, group.launcher.ended_s) == (-signal.SIGKILL, 0)
    assert not group.observe(), "once"
    assert group.living_fds() == [pidfd]
    for each in group.watched():
        os.close(each.pidfd)


@pytest.mark.parametrize(
    ("flags", "status", "code"),
    [
        ([4, 4], [9, 9], -9),
        ([0, 0], [0, 0], None),  # at work
        ([4, 0], [9, 0], None),  # only one thread has ended so far
        ([4, 4], [0, 0], None),  # by itself: its exit code comes later
        ([4, 4], [256, 256], None),
    ],
)
def test_a_killed_process_counts_as_ended_while_the_kernel_takes_it_down(
    monkeypatch: pytest.MonkeyPatch, flags: list[int], status: list[int], code: int | None
) -> None:
    def stat(which: object) -> list[str]:
        thread = int(str(which).rpartition("/")[2]) - 70
        return ["D", *["0"] * 5, str(flags[thread]), *["0"] * 42, str(status[thread])]

    monkeypatch.setattr(exit_codes, "_stat", stat)
    monkeypatch.setattr(exit_codes.os, "listdir", lambda folder: ["70", "71"])
    assert exit_codes.killed(70) == code


def test_the_group_tells_of_a_killed_rank_before_its_pidfd_does(
    two: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, rank = two
    for module in (exit_codes, worker_group):
        monkeypatch.setattr(module, "killed", lambda pid: -9)  # as if the kernel took it down
    group = WorkerGroup(1, Watched(launcher, -1), "cold")
    group.adopt(0, rank)
    while not group.observe():
        time.sleep(0.01)
    assert group.ranks[0].code == -9
    assert not group.observe(), "once"
    assert not group.living_fds()


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_rank_is_watched_without_a_thread_if_none_can_start(
    two: tuple[int, int], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def failing(*_: object) -> None:
        raise error

    pipes: list[int] = []

    def pipe(flags: int) -> tuple[int, int]:
        both = made(flags)
        pipes.append(os.fstat(both[0]).st_ino)
        return both

    made = os.pipe2
    where, name = (exit_codes.os, "pipe2") if error is OSError else (exit_codes.threading.Thread, "start")
    monkeypatch.setattr(exit_codes.os, "pipe2", pipe)
    monkeypatch.setattr(where, name, failing)
    group = WorkerGroup(1, Watched(two[0], -1), "cold")
    group.adopt(0, two[1])
    assert group.living_fds() == [group.ranks[0].pidfd]
    os.close(group.ranks[0].pidfd)
    assert not open_files() & {f"pipe:[{inode}]" for inode in pipes}


def test_a_thread_that_ends_while_its_rank_lives_is_heard_once(two: tuple[int, int]) -> None:
    group = WorkerGroup(1, Watched(two[0], -1), "cold")
    pidfd = open_pidfd(two[1])
    assert pidfd is not None
    reading, writing = os.pipe()
    os.close(writing)
    group.ranks[0] = Watched(two[1], pidfd, killed_fd=reading)
    assert not group.observe()
    assert group.living_fds() == [pidfd]
    os.close(pidfd)


def test_a_process_that_lives_is_not_killed_and_a_dead_one_has_its_code(two: tuple[int, int]) -> None:
    rank = two[1]
    assert exit_codes.killed(rank) is None
    os.kill(rank, signal.SIGKILL)
    os.waitid(os.P_PID, rank, os.WEXITED | os.WNOWAIT)
    assert exit_codes.killed(rank) == -signal.SIGKILL


def test_a_rank_that_has_called_itself_what_is_no_text() -> None:
    """A title in Chinese, cut off by the kernel after 15 bytes, ends in the middle of a character."""
    words = r"printf '\350\256' >/proc/$$/comm; echo; read -r"
    rank = subprocess.Popen(["bash", "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert rank.stdout is not None
    rank.stdout.readline()
    assert born(rank.pid)
    rank.kill()
    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
    assert exit_code(rank.pid, -1) == -signal.SIGKILL
    rank.communicate()


MAIN_THREAD_ENDS_FIRST = """
import ctypes, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(3))).start()
print(flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_process_whose_main_thread_alone_has_ended_lives() -> None:
    """Its exit code is not there yet: a launcher that ends so was told to have died without a word, where the kernel has no pidfds."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN_THREAD_ENDS_FIRST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert born(process.pid)
    process.communicate(b"")
    assert (born(process.pid), process.returncode) == ("", 3)


def test_another_process_of_the_rank_trains(two: tuple[int, int]) -> None:
    launcher, rank = two
    group = WorkerGroup(1, Watched(launcher, -1), "cold")
    helper = subprocess.Popen(["sleep", "60"])
    group.adopt(0, helper.pid)
    group.adopt(0, rank)
    helper.kill()
    helper.wait()
    assert not group.observe(), "whatever becomes of the one that has started it"
    assert group.ranks[0].pid == rank
    os.close(group.ranks[0].pidfd)
