"""Slots that a rank has written over: agent and drain process find what is left, and end of nothing that they find."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_resilient.agent.run_directory import MARK
from mt_resilient.agent.snapshots.drain_client import heard
from mt_resilient.agent.snapshots.drain_process import Drain, DrainConfig, Orders
from mt_resilient.agent.snapshots.replica_check import Replicas
from mt_resilient.checkpoint.arena import arena
from mt_resilient.checkpoint.arena.slot import Slot
from mt_resilient.checkpoint.arena.slot_header import State, complete
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files

from .test_replica_check import POLICY, RUN, Ranks

HEADER, TABLE, TABLE_END = 0, 4096, 4096 + 700
NOISE = [b"\xff" * 8, b"\0" * 8, b'"' * 3, b"[" * 500, b"9" * 40, b"-", b"\x01"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    root = Files(tmp_path_factory.mktemp("scribbled"))
    (root / paths.SNAPSHOTS).write(MARK, b"job")
    yield root  # noqa: PT022


def scribble(fd: int, chance: Random) -> None:
    with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(*chance.choice([(8, 136), (TABLE, TABLE_END)]))
            data = chance.choice([chance.choice(NOISE), chance.randbytes(8)])
            memory[at : at + len(data)] = data


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_a_rank_writes_over_its_slots(root: Files, seed: int) -> None:
    chance, ranks = Random(seed), Ranks(2, slots=3)
    config = DrainConfig(
        arena=arena.paths(ranks.fds, os.getpid()), root=root.address, run=RUN, local_ranks=2, deadline_s=0.1
    )
    reading, writing = os.pipe()
    drain = Drain(config, Orders(reading, (), 0, None))
    replicas = Replicas(ranks.slots, POLICY)
    try:
        for step in range(1, 13):
            if ranks.arenas[0].slots[0].header().state is State.FREE or step < 7:
                ranks.snapshot(step, durable=step % 3 == 0, lr=0.1 * step)
            else:
                scribble(chance.choice([fd for row in ranks.fds for fd in row]), chance)
            replicas.look(float(step), 0.0, 1, every=bool(step % 2))
            headers = [[slot.header() for slot in row] for row in ranks.slots]
            assert all(header.end <= os.fstat(slot._fd).st_size for row, said in zip(ranks.slots, headers, strict=True)
                       for slot, header in zip(row, said, strict=True) if header.whole)  # fmt: skip
            complete(headers, 2)
            for event in drain.tick(finishing=True):
                assert event["event"] in ("durable", "written", "failed", "retired")
    finally:
        for fd in (reading, writing, *(fd for row in ranks.fds for fd in row)):
            os.close(fd)
        for slot in (*(s for row in drain._slots for s in row), *(s for row in ranks.slots for s in row)):
            slot.close()
        for row in ranks.arenas:
            row.close()


def test_a_header_that_is_another_one_at_each_look_is_none(tmp_path: Path) -> None:
    """And nobody waits until it stands still."""
    ranks = Ranks(1)
    ranks.snapshot(3)
    slot = Slot(arena.paths(ranks.fds, os.getpid())[0][0])
    writer = os.fork()
    if not writer:
        with mmap.mmap(ranks.fds[0][0], 4096) as memory:
            while os.getppid() != 1:
                memory[40:120] = os.urandom(80)
    try:
        for _ in range(50):
            found = slot.header()
            assert not found.whole or found.step == 3
    finally:
        os.kill(writer, 9)
        os.waitpid(writer, 0)


@pytest.mark.parametrize(
    "line", [b"1", b"null", b"[]", b'{"event": 3}', b"[" * 100_000, b'{"event": "durable", "step": "x"}', b"\xff"]
)
def test_what_is_no_event_of_the_drain_process_is_passed_over(line: bytes) -> None:
    assert heard(line) is None
    assert heard(b'{"event": "written", "step": 3}') == {"event": "written", "step": 3}
