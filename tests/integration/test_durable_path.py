"""What may go wrong between a sealed snapshot and its COMMIT: it is told and tried again, and what is committed is there."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import pytest

from mt_resilient.agent.snapshots.drain_process import Drain, DrainConfig, Orders
from mt_resilient.checkpoint.arena.arena import Slot
from mt_resilient.checkpoint.arena.slot_header import DRAINED_OFFSET, Stamp
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import SNAPSHOTS, Attempt
from mt_resilient.checkpoint.durable import catalog, commit
from mt_resilient.checkpoint.durable.save import drain
from mt_resilient.checkpoint.slabs.slab_writer import Direct
from mt_resilient.resilience.errors import MachineError

from ..played import RUN, Node


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    node = Node(Files(tmp_path), slots=3)
    yield node
    node.close()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    target = tmp_path / "small"
    target.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", target]).returncode:
        pytest.skip("mounting a small file system takes root")
    yield target
    subprocess.run(["umount", "--lazy", target], check=True)


def undrained(node: Node, step: int) -> None:
    for slots in node.arenas:
        slots.holding(step)._store(DRAINED_OFFSET, 0)


def refuse(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """The disk refuses the `number`th `fsync` from now on, and that alone. What was asked of it is given as it goes."""
    asked: list[str] = []

    def fsync(descriptor: int, real=os.fsync) -> None:
        asked.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        if len(asked) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return asked


def test_whatever_the_disk_refuses_to_sync_is_tried_again_and_complete(tmp_path, node, monkeypatch):
    node.snapshot(1)
    slots = [[Slot(path) for path in row] for row in node.paths]
    attempt = Attempt(run=RUN, stamp=Stamp(1, 0, 1))
    for number in count(1):
        root = Files(tmp_path / str(number))
        asked = refuse(monkeypatch, number)
        try:
            drain(slots, attempt, root, 0, Direct())
        except MachineError:
            assert drain(slots, attempt, root, 0, Direct()) is not None
        assert catalog.verify(attempt.under(root)) == [], f"after {asked[number - 1]} was refused"
        monkeypatch.undo()
        if len(asked) < number:
            break
    assert number > 20
    for slot in chain(*slots):
        slot.close()


def test_a_snapshot_is_on_disk_only_once_its_name_is(node, monkeypatch):
    """COMMIT was renamed, and then the drain process was killed."""
    node.snapshot(1)
    snapshot = node.drain_here(1)
    undrained(node, 1)
    asked = refuse(monkeypatch, 0)
    node.drain_here(1)
    assert {str(snapshot), str(node.root / SNAPSHOTS)} <= set(asked)


@pytest.mark.parametrize("mb_per_s", [0.0, 1e5], ids=["tensorstore", "direct"])
def test_a_write_that_ends_amid_a_slab_is_tried_again(tmp_path, mb_per_s):
    node = Node(Files(tmp_path), nbytes=2 << 20)
    node.snapshot(1)
    process = node.drain(max_write_mb_per_s=mb_per_s)
    process.events("durable")
    limits = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    node.snapshot(2)
    failed = process.events("failed")[-1]
    assert "File too large" in failed["reason"]
    assert (failed["step"], failed["retry_in_s"]) == (2, 1.0)
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, limits)
    assert process.events("durable")[-1]["step"] == 2
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    node.snapshot(3)
    process.events("failed")
    process.kill()
    successor = node.drain()
    assert successor.events("durable")[-1]["step"] == 3, "it knows nothing of failures"
    successor.finish()
    assert [catalog.verify(snapshot) for snapshot in catalog.committed(node.root)] == [[], []]
    node.close()


def test_what_is_in_the_way_of_a_slab_may_go_away(node):
    node.snapshot(1)
    snapshot = node.drain_here(1).path
    undrained(node, 1)
    for name in ("COMMIT", "rank-00001.json"):
        (snapshot / name).unlink()
    metadata = snapshot / "rank-00001/zarr.json"
    if os.geteuid() or subprocess.run(["mount", "--bind", metadata, metadata]).returncode:
        pytest.skip("mounting takes root")
    process = node.drain()
    failed = process.events("failed")[-1]
    subprocess.run(["umount", "--lazy", metadata], check=True)
    assert failed["retry_in_s"] == 1.0
    assert "rank-00001 is in the way" in failed["reason"]
    assert process.events("durable")[-1]["step"] == 1
    process.finish()


def test_what_an_older_step_has_left_is_not_the_space_that_the_last_one_lacks(small_disk):
    node = Node(Files(small_disk), nbytes=2 << 20, slots=3)
    node.snapshot(1)
    snapshot = node.drain_here(1).path
    undrained(node, 1)
    for name in ("COMMIT", "rank-00001.json", "rank-00001/c/0/0"):
        (snapshot / name).unlink()
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(5 << 20))
    process = node.drain()
    process.events("failed")
    assert (snapshot / "rank-00000.json").exists(), "the part of one rank is there"
    node.snapshot(2)
    ballast.write_bytes(bytes(7 << 19))
    assert process.events("durable")[-1]["step"] == 2
    process.kill()
    node.close()


def test_slabs_that_find_no_space_are_told_once_and_tried_again(small_disk):
    node = Node(Files(small_disk), nbytes=2 << 20)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(5 << 20))
    node.snapshot(1)
    slots = [[Slot(path) for path in row] for row in node.paths]
    attempt = Attempt(run=RUN, stamp=Stamp(1, 0, 1))
    with pytest.raises(MachineError, match="No space left"):
        drain(slots, attempt, node.root, 0, Direct())
    ballast.unlink()
    assert drain(slots, attempt, node.root, 0, Direct()) is not None
    assert catalog.verify(attempt.under(node.root)) == []
    for slot in chain(*slots):
        slot.close()
    node.close()


def test_a_step_that_was_given_up_and_taken_again_goes_to_disk(node):
    node.snapshot(1)
    for slots in node.arenas:
        slots.drop_after(0)
    node.snapshot(1)
    assert [slot.header().step for slot in node.arenas[0].slots] == [1, 1, -1]
    assert [event["event"] for event in node.drain().finish()] == ["durable", "finished"]


def test_snapshots_that_cannot_be_listed_are_retired_next_time(node, tmp_path, monkeypatch):
    config = DrainConfig(arena=node.paths, root=str(tmp_path), run=RUN, local_ranks=2, keep=1)
    silent, _ = pipe = os.pipe()
    state = Drain(config, Orders(silent, ()))
    node.snapshot(1)
    assert [event["event"] for event in state.tick()] == ["durable"]
    node.snapshot(2)
    events = state.tick()
    assert next(events)["event"] == "durable"
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda _: os.stat("x" * 300))
        with pytest.raises(MachineError, match="name too long"):
            catalog.look(node.root)
        assert list(events) == []
    node.snapshot(3)
    assert [event.get("step") for event in state.tick()] == [3, 2, 1]
    for end in pipe:
        os.close(end)


def test_nothing_is_written_where_the_job_s_storage_is_no_longer_mounted(node, tmp_path):
    root, away = tmp_path / "snapshots", tmp_path / "away"
    process = node.drain()
    node.snapshot(1)
    process.events("durable")
    root.rename(away)
    node.snapshot(2)
    assert "unmounted, moved or deleted" in process.events("failed")[-1]["reason"]
    assert not root.exists()
    away.rename(root)
    assert process.events("durable")[-1]["step"] == 2


def test_names_that_a_stat_does_not_show_yet_are_found(node, monkeypatch):
    """An NFS client remembers for up to a minute that a name was missing, until the directory is opened."""
    node.snapshot(1)
    snapshot = node.drain_here(1)
    stat = os.stat

    def stale(path: os.PathLike[str] | str, **given: object) -> os.stat_result:
        if given.get("dir_fd") is None and str(path).startswith(f"{snapshot.path}/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return stat(path, **given)

    monkeypatch.setattr(os, "stat", stale)
    assert catalog.committed(node.root) == [snapshot]
    assert commit.missing_ranks(snapshot, 3) == [2]


def test_what_will_be_written_again_is_not_deleted_before(node, tmp_path):
    """The drain process was killed between COMMIT and its note of it. Were its snapshot deleted and then written by the same name, a
    deletion that hangs in an object store could be carried out over it."""
    config = DrainConfig(arena=node.paths, root=str(tmp_path), run=RUN, local_ranks=2, keep=1)
    silent, _ = pipe = os.pipe()
    node.snapshot(1)
    node.drain_here(1)
    undrained(node, 1)
    node.snapshot(2)
    state = Drain(config, Orders(silent, ()))
    assert [(event["event"], event["step"]) for event in state.tick()] == [("durable", 2)]
    assert [(event["event"], event["step"]) for event in state.tick()] == [("durable", 1)]
    node.snapshot(3)
    told = [(event["event"], event["step"]) for event in state.tick()]
    assert told == [("durable", 3), ("retired", 2), ("retired", 1)], (
        "an order may have gone back to 1, until a newer step is written"
    )
    for end in pipe:
        os.close(end)


def test_what_a_killed_deletion_has_left_is_not_taken_for_a_part(node, monkeypatch):
    """A newer step was written first, what an older one had left was being deleted, and then came the older one's turn."""
    node.snapshot(1)
    snapshot = node.drain_here(1)
    for number in count(1):
        undrained(node, 1)
        asked = killed_deleting(monkeypatch, number)
        with suppress(KeyboardInterrupt):
            commit.delete(snapshot)
        monkeypatch.undo()
        assert node.drain_here(1) == snapshot
        assert catalog.verify(snapshot) == [], f"killed at {asked[-1]}"
        if len(asked) < number:
            break
    assert number > 6


def killed_deleting(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """The process ends at the `number`th file that it deletes from now on. What was to be deleted is given as it goes."""
    asked: list[str] = []

    def unlink(path: object, *, dir_fd: int | None = None, real=os.unlink) -> None:
        asked.append(str(path))
        if len(asked) == number:
            raise KeyboardInterrupt
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    return asked
