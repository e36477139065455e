"""The door through which ranks get the agent's files, and what stands before it."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from mt_resilient.agent.ranks.descriptor_server import Door
from mt_resilient.resilience.ipc.descriptor_client import VARIABLE, opened

SAYS = b"the agent's file"
ELSEWHERE = "pid:[1]"
"""A PID namespace in which nobody is."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(SAYS)
    return str(tmp_path / "file")


def environ(door: Door, **changed: str) -> dict[str, str]:
    """Of local rank 1, somewhere else than the agent."""
    _, name, token = json.loads(door.environment[VARIABLE])
    said = {"namespace": ELSEWHERE, "name": name, "token": token} | changed
    return {VARIABLE: json.dumps([*said.values()]), "LOCAL_RANK": "1"}


def read(path: str, known: dict[str, str]) -> bytes:
    fd = opened(path, os.O_RDONLY, known)
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_a_rank_that_does_not_see_the_agent_is_given_its_file(file: str) -> None:
    door = Door([file])
    assert read(file, environ(door)) == SAYS
    assert door.pids == {(1, os.getpid()): os.getpid()}


@pytest.mark.parametrize("changed", [{"token": "guessed"}, {"token": "ä"}])
def test_only_who_has_the_token_is(file: str, changed: dict[str, str]) -> None:
    door = Door([file])
    with pytest.raises(OSError, match=r"the agent (has|sent) no"):
        read(file, environ(door, **changed))
    assert not door.pids


def test_no_other_file_is_given(file: str) -> None:
    with pytest.raises(OSError, match="no such file for this process"):
        read(__file__, environ(Door([file])))


@pytest.mark.parametrize(
    "change",
    [
        lambda asked: b"",
        lambda asked: b"[" * 3000,
        lambda asked: json.dumps({**asked, "rank": float("inf")}).encode(),
        lambda asked: json.dumps({**asked, "path": []}).encode(),
        lambda asked: json.dumps([asked]).encode(),
    ],
)
def test_whatever_is_said_to_it_it_stays_open(file: str, change: Callable[[dict[str, object]], bytes]) -> None:
    door = Door([file])
    _, name, token = json.loads(door.environment[VARIABLE])
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as asking:
        asking.connect(f"\0{name}")
        asking.send(change({"path": file, "flags": 0, "token": token, "rank": "1", "pid": 7}))
        assert not asking.recv(100)
    assert read(file, environ(door)) == SAYS


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("below", [True, False])
def test_a_rank_that_has_become_another_user_is_given_the_file(file: str, below: bool) -> None:
    """And nobody else of that user: whom the agent has not started has no business there."""
    Path(file).chmod(0o600)
    door = Door([file])
    known = {VARIABLE: door.environment[VARIABLE], "LOCAL_RANK": "0"}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        between = os.getpid()
        if not below and os.fork():
            os._exit(0)
        os.setuid(65534)
        while os.getppid() == between:  # until somebody else than this test has adopted it
            os.sched_yield()
        try:
            os.write(writing, read(file, known))
        except OSError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading, "rb") as told:
        assert (told.read() == SAYS) is below
