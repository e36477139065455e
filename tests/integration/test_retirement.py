"""Snapshots are deleted: by processes that are killed at it, while others read, on full disks; what is listed is always whole."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from crc32c import crc32c
from msgspec.structs import replace

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.object_store import Objects
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.backend.place import Place
from mt_resilient.checkpoint.durable import catalog, commit, load
from mt_resilient.checkpoint.durable.retention import RetentionPolicy, Stored
from mt_resilient.checkpoint.format.manifest import Commit, Figures
from mt_resilient.resilience.clock import wall_s
from mt_resilient.resilience.errors import MachineError

from ..played import RUN, Node

KEEP_ALL = {"keep": 1, "keep_every_steps": 1}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(Files(tmp_path))
    yield node
    node.close()


def steps(root: Place) -> list[int]:
    return [attempt.stamp.step for attempt in catalog.look(root).durable]


def left(root: Files) -> int:
    return len(list((root.path / paths.SNAPSHOTS).glob("[!.]*")))


def change(snapshot: Place, written_s: float) -> None:
    """Its COMMIT tells another time."""
    told = Commit.from_json(snapshot.read(paths.COMMIT))
    snapshot.write(paths.COMMIT, replace(told, figures=Figures.of(written_s, told.figures.bytes)).to_json())


# Killed at it

DELETER = """
import os, sys
from pathlib import Path
from mt_resilient.checkpoint.durable import catalog
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.object_store import Objects
from mt_resilient.checkpoint.durable.retention import RetentionPolicy
def say(word):  # a line is one write: print may take two (PYTHONUNBUFFERED), and who is killed between them tears it
    os.write(1, f"{word}\\n".encode())
while path := sys.stdin.readline().strip():
    if pid := os.fork():
        say(pid)
        sys.stdin.readline()  # until somebody has killed it: a number that is still its own
        os.waitpid(pid, 0)
    else:
        root = Objects.at(f"file://{path}") if sys.argv[1] == "objects" else Files(Path(path))
        say(len(catalog.retire(root, RetentionPolicy(keep=2), 0.0)))
        os._exit(0)
    say("over")
"""
SNAPSHOTS, KILLS = 20, 24


@pytest.fixture(params=["files", "objects"])
def deleter(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Forks a process that deletes for each path it is given."""
    command = [sys.executable, "-c", DELETER, request.param]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_deleter_that_is_killed_at_any_moment_leaves_whole_snapshots_only(
    deleter: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The calls that an object store gets are made on a directory here, through tensorstore: processes can share it."""
    made, root, chance = tmp_path / "made", tmp_path / "root", random.Random(1)
    node = Node(Files(made), nbytes=5000)
    for step in range(1, SNAPSHOTS + 1):
        node.snapshot(step)
        node.drain_here(step)
    node.close()
    amid, torn = 0, 0
    assert deleter.stdin is not None
    assert deleter.stdout is not None
    for kill in count():
        if kill > KILLS and ((amid >= 5 and torn >= 3) or kill > 200):
            break
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(made, root)
        deleter.stdin.write(f"{root}\n")
        deleter.stdin.flush()
        pid = int(deleter.stdout.readline())
        if kill == 0:  # it is let go to its end
            assert int(deleter.stdout.readline()) == SNAPSHOTS - 2
        else:
            whole, ends_s = chance.randint(3, SNAPSHOTS), time.monotonic() + 60
            while len([*root.glob(f"{paths.SNAPSHOTS}/*/{paths.COMMIT}")]) > whole:
                assert time.monotonic() < ends_s
            time.sleep(chance.random() * 0.002)
            os.kill(pid, signal.SIGKILL)
        deleter.stdin.write("killed\n")
        deleter.stdin.flush()
        while (said := deleter.stdout.readline()) != "over\n":
            assert said, "who forks has ended"
        found = catalog.look(Files(root))
        assert [attempt.stamp.step for attempt in found.durable[:2]] == [SNAPSHOTS, SNAPSHOTS - 1]
        for attempt in found.durable:
            assert catalog.verify(attempt.under(Files(root))) == [], attempt
        amid += 2 < len(found.durable) < SNAPSHOTS
        torn += bool(found.remains)
        catalog.sweep(Files(root), Attempt(run=RUN, stamp=Stamp(1, 0, SNAPSHOTS + 1)), set())
        assert left(Files(root)) == len(found.durable), "what was begun is ended"
        catalog.retire(Files(root), RetentionPolicy(keep=2), 0.0)
        assert (steps(Files(root)), left(Files(root))) == ([SNAPSHOTS, SNAPSHOTS - 1], 2)
    print(f"{amid} of {kill - 1} kills came amid the deletions, {torn} of these amid one")
    assert amid >= 5
    assert torn >= 3


# While somebody reads

READER = """
import sys
from pathlib import Path
from mt_resilient.checkpoint.durable import commit
from mt_resilient.checkpoint.backend.filesystem import Files
with commit.reading(Files(Path(sys.argv[1]))):
    print("reading", flush=True)
    sys.stdin.readline()
"""


def test_of_rejected_snapshots_the_newest_stay_and_the_others_go_with_time(node: Node) -> None:
    for step in range(1, 7):
        node.snapshot(step)
        commit.reject(node.drain_here(step), "rank 1 could not load it", 1000.0)
    commit.mark(Attempt(run=RUN, stamp=Stamp(1, 0, 2)).under(node.root), paths.KEPT)
    policy = RetentionPolicy(keep=1, keep_own_h=1.0)
    assert catalog.retire(node.root, policy, 1000.0 + 3600) == []
    gone = catalog.retire(node.root, policy, 1000.0 + 3601)
    assert [(going.attempt.stamp.step, going.why) for going in gone] == [
        (step, "it was set aside more than 1 h ago") for step in (1, 3, 4)
    ]
    assert sorted(each.stamp.step for each in catalog.look(node.root).rejected) == [2, 5, 6]


@pytest.mark.parametrize("ending", ["in order", "killed"])
def test_what_another_process_reads_is_deleted_later(node: Node, ending: str) -> None:
    for step in (1, 2, 3):
        node.snapshot(step)
        node.drain_here(step)
    oldest = catalog.committed(node.root)[-1]
    assert isinstance(oldest, Files)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(oldest.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"reading\n"
    with commit.reading(oldest):  # two may
        pass
    assert [going.attempt.stamp.step for going in catalog.retire(node.root, RetentionPolicy(keep=1), 0.0)] == [2]
    assert steps(node.root) == [3, 1]
    assert catalog.verify(oldest) == []
    reader.send_signal(signal.SIGKILL) if ending == "killed" else None
    reader.communicate()
    assert [going.attempt.stamp.step for going in catalog.retire(node.root, RetentionPolicy(keep=1), 0.0)] == [1]
    assert (steps(node.root), left(Files(Path(str(node.root))))) == ([3], 1)


@pytest.mark.parametrize("kind", ["files", "objects"])
def test_a_reader_that_nothing_holds_off_is_told_and_gets_no_wrong_byte(tmp_path: Path, kind: str) -> None:
    """Where a file system has no locks, somebody deletes by hand, or it is an object store."""
    node = Node(Files(tmp_path), nbytes=30 << 20)
    node.snapshot(1)
    snapshot = node.drain_here(1)
    assert isinstance(snapshot, Files)
    read = snapshot if kind == "files" else Objects.at(f"file://{snapshot.path}")
    seen = 0
    manifests = [load.open_rank(read, rank) for rank in (0, 1)]

    def read_all() -> None:
        nonlocal seen
        with commit.reading(read):
            for manifest in manifests:
                for index, chunk in load.chunks(read, manifest):
                    assert crc32c(chunk) == manifest.chunk_crc32c[index]
                    seen += 1
                    shutil.rmtree(snapshot.path, ignore_errors=True)

    with pytest.raises(MachineError, match="was deleted while it was being read"):
        read_all()
    assert 1 <= seen <= manifests[0].table.image.chunks
    node.close()


def test_damage_is_damage_and_no_deletion(node: Node) -> None:
    node.snapshot(1)
    snapshot = node.drain_here(1)
    snapshot.delete("rank-00001.json")
    assert "rank-00001.json: No such file" in catalog.verify(snapshot)[0]
    commit.reject(snapshot, "rank 1 could not load it", 0.0)
    assert "rejected: rank 1 could not load it" in catalog.verify(snapshot)[0]


# Age and size


def test_age_and_size_are_told_by_commit_and_read_once(node: Node) -> None:
    for step in range(1, 7):
        node.snapshot(step)
        node.drain_here(step)
    found = {attempt.stamp.step: attempt for attempt in catalog.look(node.root).durable}
    now_s = wall_s()
    figures = commit.read_commit(found[1].under(node.root)).figures
    files = [path for path in Path(str(found[1].under(node.root))).rglob("*") if path.is_file()]
    metadata = ("COMMIT", "zarr.json")
    assert figures.bytes == sum(path.stat().st_size for path in files if path.name not in metadata)
    assert abs(figures.written_s - now_s) < 60
    for step, hours in ((1, 50), (2, 30), (3, 10)):
        change(found[step].under(node.root), written_s=now_s - hours * 3600)
    known: dict[Attempt, Stored] = {}
    policy = RetentionPolicy(**KEEP_ALL, max_age_h=40)
    (gone,) = catalog.retire(node.root, policy, now_s, known=known)
    assert (gone.attempt.stamp.step, gone.why) == (1, "it is more than 40 h old")
    change(found[2].under(node.root), written_s=now_s)  # nobody looks again
    assert [going.attempt.stamp.step for going in catalog.retire(node.root, policy, now_s + 40_000, known=known)] == [2]
    policy = RetentionPolicy(**KEEP_ALL, max_bytes=2 * figures.bytes + 100)
    assert [going.attempt.stamp.step for going in catalog.retire(node.root, policy, now_s)] == [4, 3]
    assert steps(node.root) == [6, 5]


def test_a_commit_that_cannot_be_read_costs_nothing(node: Node) -> None:
    for step in (1, 2, 3):
        node.snapshot(step)
        node.drain_here(step)
    catalog.look(node.root).durable[1].under(node.root).write(paths.COMMIT, b"{")
    assert catalog.retire(node.root, RetentionPolicy(**KEEP_ALL, max_age_h=1), wall_s()) == []
    assert steps(node.root) == [3, 2, 1]


# The drain process


def test_the_drain_process_retires_by_its_policy_and_spares_what_it_is_told(node: Node) -> None:
    process = node.drain(keep=1, protected=[str(Attempt(run=RUN, stamp=Stamp(1, 0, 1)))])
    for step in (1, 2, 3):
        node.snapshot(step)
        process.events("durable")
    (retired,) = process.events("retired")
    assert (retired["step"], retired["why"]) == (2, "1 newer snapshots exist")
    assert process.process.stdin is not None
    process.process.stdin.write(f"protect {Attempt(run=RUN, stamp=Stamp(1, 0, 3))} nonsense\n".encode())
    process.say("reserve", 1)
    process.events("reserved")  # so it has obeyed the line before, too
    node.snapshot(4)
    assert process.events("retired")[-1]["step"] == 1
    process.process.stdin.write(b"protect\n")
    process.say("reserve", 2)
    process.events("reserved")
    node.snapshot(5)
    assert [event["step"] for event in process.finish() if event["event"] == "retired"] == [4, 3]


def test_a_full_disk_is_freed_of_what_may_go(tmp_path: Path) -> None:
    """The drain process was killed before it had deleted, and there is no room for a newer one: deletion goes on all the same."""
    disk = tmp_path / "small"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk]).returncode:
        pytest.skip("mounting a small file system takes root")
    node = Node(Files(disk), nbytes=1 << 20)
    try:
        for step in (1, 2, 3):
            node.snapshot(step)
            node.drain_here(step)
        node.snapshot(4)
        process = node.drain(keep=1)
        failed, *_, durable = process.events("durable")
        assert "no space left" in failed["reason"].lower()
        assert durable["step"] == 4
        process.finish()
        assert steps(node.root) == [4]
        assert catalog.verify(catalog.committed(node.root)[0]) == []
    finally:
        node.close()
        subprocess.run(["umount", "--lazy", disk], check=True)
