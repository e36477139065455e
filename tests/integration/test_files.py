"""Files that are not what they should be, and a file system that does not say: nothing hangs, and nothing is passed over."""

import errno
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import catalog, load
from mt_resilient.checkpoint.slabs import direct_io
from mt_resilient.formats import dcp_reader, megatron_names, torch_zip
from mt_resilient.resilience.errors import MachineError, SnapshotError
from mt_resilient.resilience.report.journal import Journal

from ..harness import BIN, environment
from ..played import Node

NAMES = [paths.COMMIT, "rank-00001.json", "rank-00001/zarr.json", "rank-00001/c/0/0"]


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """Who opens a pipe waits for its other end for ever."""

    def over(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def snapshot(tmp_path: Path) -> Files:
    """A sound snapshot of step 1."""
    node = Node(Files(tmp_path))
    node.snapshot(1)
    found = node.drain_here(1)
    node.close()
    assert isinstance(found, Files)
    return found


def put(kind: str, path: Path) -> None:
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as made:
                here = os.getcwd()
                os.chdir(path.parent)  # a socket's path is short
                try:
                    made.bind(path.name)
                finally:
                    os.chdir(here)
        case "device":
            if os.geteuid():
                pytest.skip("making devices takes root")
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # zeros without end


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_damage_and_holds_up_nobody(snapshot: Files, name: str, kind: str) -> None:
    path = snapshot.path / name
    path.unlink()
    put(kind, path)
    (problem,) = catalog.verify(snapshot)
    assert str(path) in problem
    with pytest.raises(SnapshotError):
        list(load.chunks(snapshot, load.open_rank(snapshot, 1)))


def test_a_shard_that_has_become_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "shard")
    with pytest.raises(SnapshotError, match="shard is no regular file; it was not read"):
        list(direct_io.read([(tmp_path / "shard", 0)], 4096))
    with pytest.raises(SnapshotError, match="no regular file"):
        direct_io.tail(tmp_path / "shard", 0, 10)


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_a_pipe_in_the_place_of_commit_does_not_hold_up_the_command(snapshot: Files, action: str) -> None:
    (snapshot.path / paths.COMMIT).unlink()
    os.mkfifo(snapshot.path / paths.COMMIT)
    place = str(snapshot.path.parents[1])
    done = subprocess.run(
        [BIN / "mt-resilient", "snapshots", action, place],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, snapshot.name in done.stdout) == (0 if action == "ls" else 6, True), done.stderr


def test_a_pipe_in_the_place_of_commit_is_retired_like_any_other(snapshot: Files) -> None:
    (snapshot.path / paths.COMMIT).unlink()
    os.mkfifo(snapshot.path / paths.COMMIT)
    with snapshot.reading(paths.COMMIT):
        pass
    assert snapshot.retract(paths.COMMIT)
    assert not snapshot.there(paths.COMMIT)


def test_a_foreign_checkpoint_of_pipes_is_refused(tmp_path: Path) -> None:
    for name in ("metadata.json", "common.pt"):
        os.mkfifo(tmp_path / name)
    (tmp_path / ".metadata").touch()
    with pytest.raises(SnapshotError, match="no regular file"):
        megatron_names.from_megatron(tmp_path)
    with pytest.raises(SnapshotError, match="no regular file"):
        torch_zip.load(tmp_path / "common.pt")
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(SnapshotError, match="no regular file"):
        dcp_reader.open_dcp(tmp_path)


def test_a_journal_that_is_a_pipe_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    assert list(Journal(tmp_path / "journal.jsonl").read()) == []


def test_a_directory_that_cannot_be_listed_is_not_called_durable(
    snapshot: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = str(snapshot.path / "rank-00001")

    def scandir(path: str, real=os.scandir):
        if os.fspath(path) == refused:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), refused)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(MachineError, match="rank-00001: Permission denied"):
        snapshot.sync()
