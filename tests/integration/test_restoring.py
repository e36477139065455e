"""Storage that fails while a state is read back: it is asked again, and what it holds is not called damaged for that."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

from mt_resilient.checkpoint.arena import arena, fill
from mt_resilient.checkpoint.arena.arena import Slot
from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog, load
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.slabs.slab_writer import writer
from mt_resilient.resilience.errors import MachineError
from mt_resilient.resilience.inprocess.tally import Directive, Held, Judgement, RankPolicy, Wanted
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.snapshot import restore
from mt_resilient.training.snapshot.reachable import Reachable
from mt_resilient.training.snapshot.restore import Unreadable, Unrestorable
from mt_resilient.training.snapshot.snapshot_pace import Pace
from mt_resilient.training.snapshot.snapshots import Tape
from mt_resilient.training.state.sources import source_of

TRANSIENT = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EINTR, errno.ENOMEM]


class Rank:
    """The only one of its job, with a snapshot of step 1 on disk."""

    def __init__(self, root: Path) -> None:
        self.model = nn.Linear(700, 300)
        self.expected = self.model.weight.detach().clone()
        self.fds = arena.create(1, 3)
        paths = arena.paths(self.fds, os.getpid())
        handoff = Handoff(
            generation=1,
            board="",
            arena=tuple(map(tuple, paths)),
            snapshots=str(root),
            resume_step=-1,
            replay_until=-1,
            origin="",
            every_steps=1,
            durable_every_steps=1,
            reach_steps=100,
            policy=RankPolicy(),
            turns=(),
            windows=(),
            modules="",
        )
        page = Page(memoryview(bytearray(PAGE_BYTES)))
        at = Attachment(handoff=handoff, page=page, rank=0, local_rank=0, world=1)
        self.tape = Tape(at, {"model": source_of("model", self.model)}, Pace(1))
        self.tape.record(1, Wanted.ON_DISK)
        self.tape.settle(Judgement(directive=Directive.GO_ON, newest=Held.WHOLE, earlier=Held.WHOLE))
        slots = [[Slot(path) for path in row] for row in paths]
        report = drain(slots, Attempt(run="5eed5eed", stamp=Stamp(1, 0, 1)), Files(root), 0, writer(Files(root)))
        for slot in chain(*slots):
            slot.close()
        assert report is not None
        self.snapshot = report.snapshot
        with torch.no_grad():
            self.model.weight.zero_()

    def close(self) -> None:
        self.tape._arena.close()
        for fd in chain(*self.fds):
            os.close(fd)


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(restore, "_PAUSES_S", (0.01,) * 4)
    rank = Rank(tmp_path)
    yield rank
    rank.close()


def failing(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> None:
    """The next so many reads of a slab fail with `code`."""
    left = [times]

    def preadv(*given: object, real=os.preadv) -> int:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*given)

    monkeypatch.setattr(os, "preadv", preadv)


def go_back(rank: Rank, whose: str) -> None:
    if whose == "own":
        rank.tape.restorer.from_store(Files(rank.snapshot.path.parents[1]), 1)
    else:
        assert rank.tape.restorer.start_from(rank.snapshot) == 1


def test_what_the_agent_refuses_is_not_restored_although_it_is_committed(rank: Rank) -> None:
    restorer, root, name = rank.tape.restorer, Files(rank.snapshot.path.parents[1]), rank.snapshot.name
    with pytest.raises(Unreadable, match="no committed snapshot of step 1"):
        restorer.from_store(root, 1, unusable=(name,))
    restorer.from_store(root, 1, name, unusable=(name,))  # an order names it
    assert [len(Reachable(rank.tape._arena, str(root.path), told)._on_disk()) for told in ((), (name,))] == [1, 0]


def test_steps_that_were_left_are_not_gone_back_to_although_the_disk_refused_the_mark(rank: Rank) -> None:
    snapshots = rank.snapshot.path.parent
    for rewinds, step in ((0, 3), (1, 2)):
        shutil.copytree(rank.snapshot.path, snapshots / str(Attempt(run="5eed5eed", stamp=Stamp(1, rewinds, step))))
    assert rank.tape.reachable.newest(10) == 1, "memory comes first"
    rank.tape.rewinds = 1
    rank.tape.go_back(1)
    rank.tape._arena.drop_after(0)
    assert [rank.tape.reachable.newest(at_most) for at_most in (10, 1)] == [2, 1]
    assert [rank.tape.reachable.snapshot(step) is not None for step in (1, 2, 3)] == [True, True, False]


def test_a_rank_restores_the_snapshot_of_the_lineage_that_was_chosen_or_none(rank: Rank) -> None:
    """Another rank restores that one too. With the bits of another lineage here, the weights would be mixed."""
    again = rank.snapshot.path.parent / str(Attempt(run="5eed5eed", stamp=Stamp(2, 0, 1)))
    shutil.copytree(rank.snapshot.path, again)
    with pytest.raises(Unreadable, match="step 1 of generation 3, rewind 0"):
        rank.tape.go_back(1, course=(3, 0))
    with pytest.raises(
        Unrestorable, match=f"{again}/COMMIT belongs to"
    ):  # it has looked there, and not into its memory
        rank.tape.go_back(1, course=(2, 0))
    for _ in range(2):
        rank.tape.go_back(1, course=(1, 0))
        assert torch.equal(rank.model.weight, rank.expected)
        rank.tape._arena.drop_after(0)  # then from disk, where the other one is newer


def test_bytes_that_this_rank_alone_finds_wrong_condemn_no_snapshot(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its device returns another bit than was copied to it."""
    arrived = fill.arrived
    flipped = lambda layout, found, words: arrived(layout, {at: word ^ 1 for at, word in found.items()}, words)  # noqa: E731
    monkeypatch.setattr(fill, "arrived", flipped)
    with pytest.raises(Unreadable, match=r"arrived with the fingerprint .* Read again, the snapshot is sound"):
        rank.tape.restorer.from_store(Files(rank.snapshot.path.parents[1]), 1)
    monkeypatch.undo()
    (rank.snapshot.path / "rank-00000/c/0/0").write_bytes(b"")
    with pytest.raises(Unrestorable, match="0 bytes"):
        rank.tape.restorer.from_store(Files(rank.snapshot.path.parents[1]), 1)


def test_a_file_system_that_opens_for_direct_io_and_then_refuses_it_is_read(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []
    try:
        os.close(os.open(next(rank.snapshot.path.rglob("COMMIT")), os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the temporary directory takes no direct I/O")

    def preadv(descriptor: int, *given: object, real=os.preadv) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, *given)

    monkeypatch.setattr(os, "preadv", preadv)
    assert catalog.verify(rank.snapshot) == []
    go_back(rank, "own")
    assert torch.equal(rank.model.weight, rank.expected)
    assert refused


@pytest.mark.parametrize("code", TRANSIENT)
@pytest.mark.parametrize("whose", ["own", "another job's"])
def test_a_read_that_fails_for_a_while_is_asked_again(rank, code, whose, monkeypatch):
    failing(monkeypatch, code, 3)
    go_back(rank, whose)
    assert torch.equal(rank.model.weight, rank.expected)


@pytest.mark.parametrize("whose", ["own", "another job's"])
def test_a_read_that_goes_on_failing_says_nothing_about_the_snapshot(rank, whose, monkeypatch):
    failing(monkeypatch, errno.ESTALE, 10**6)
    with pytest.raises(Unreadable, match=r"cannot read the snapshot of step 1: .*c/0/0 cannot be read: Stale"):
        go_back(rank, whose)
    with pytest.raises(MachineError, match="cannot be read"):
        catalog.verify(rank.snapshot)
    monkeypatch.undo()
    assert catalog.verify(rank.snapshot) == []


@pytest.mark.parametrize("short", [100, 4096, 5000])
def test_a_read_that_gives_less_than_there_is_is_no_end_of_the_file(rank, short, monkeypatch):
    """As a network file system's may, that was interrupted."""
    expected = [bytes(chunk) for _, chunk in load.chunks(rank.snapshot, load.open_rank(rank.snapshot, 0))]
    done = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, real=os.preadv) -> int:
        done.append(offset)
        return min(real(descriptor, buffers, offset), short if len(done) == 1 else 1 << 40)

    monkeypatch.setattr(os, "preadv", preadv)
    found = load.chunks(rank.snapshot, load.open_rank(rank.snapshot, 0))
    assert [bytes(chunk) for _, chunk in found] == expected
