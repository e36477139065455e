"""The run directory: one agent at a time, and a sentence for what keeps it from being used."""

import errno
import fcntl
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from mt_resilient.agent.run_directory import MARK, RunDirectory, command_again, writable
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.resilience.errors import MachineError, UsageError
from mt_resilient.resilience.report.journal import Journal
from mt_resilient.resilience.store.etcd.access import Papers

from ..open_files import open_files


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "runs" / "train")


def test_all_files_lie_under_an_absolute_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("train"))
    assert run.root == tmp_path / "train"
    assert {path.parent for path in (run.etcd, run.logs, run.journal, run.endpoint, run.modules)} == {run.root}


def test_the_command_that_starts_a_job_again_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/mt-resilient", "run", "--", "torchrun", "a b.py"])
    assert command_again() == f"cd {tmp_path} && mt-resilient run -- torchrun 'a b.py'"
    monkeypatch.setattr(sys, "argv", sys.argv[:1])
    assert command_again() == "", "a script has started the torchrun"


def test_the_lock_refuses_a_second_agent_until_the_first_has_released_it(run: RunDirectory) -> None:
    run.take()
    assert run.logs.is_dir()
    run.endpoint.write_text("ours")
    with pytest.raises(UsageError, match=f"another mt-resilient is running in {run.root}; .*status --run-dir"):
        RunDirectory(run.root).take()
    assert run.endpoint.read_text() == "ours"
    run.release()
    assert not run.endpoint.exists()
    following = RunDirectory(run.root)
    following.take()
    following.release()
    following.release()  # nothing is left to release


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_named(run: RunDirectory, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as Lustre without `-o flock`."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        MachineError,
        match=f"{run.root} cannot be locked .*; nothing was started. .*another one on a local disk with --run-dir",
    ):
        run.take()
    assert not [name for name in open_files() if name.startswith(str(run.root))]


def test_a_dead_agent_does_not_count_although_a_process_has_its_number(run: RunDirectory) -> None:
    """Its parent has not yet waited for it, or another process has the number now."""
    run.take()
    pid = os.fork()
    if pid == 0:
        run.publish("job", ["127.0.0.1:2379"], Papers())
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert run.agent() is None
    os.waitpid(pid, 0)
    run.publish("job", ["127.0.0.1:2379"], Papers())
    here = run.agent()
    assert here
    assert here["pid"] == os.getpid()
    run.endpoint.write_text(json.dumps({**here, "born": "1"}))
    assert run.agent() is None


def test_the_lock_ends_with_its_process_although_the_file_stays(run: RunDirectory) -> None:
    pid = os.fork()
    if pid == 0:
        run.take()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (run.root / "lock").exists()
    run.take()
    run.release()


def owned(root: Path, snapshots: Path) -> RunDirectory:
    run = RunDirectory(root)
    for directory in (run.root, snapshots):
        directory.mkdir(parents=True, exist_ok=True)
    run.own(Files(snapshots))
    return run


def test_of_two_jobs_that_begin_in_one_place_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one looks for a mark before the first one writes it."""
    shared, there = tmp_path / "shared", Files.there
    owned(tmp_path / "a", shared)
    monkeypatch.setattr(Files, "there", lambda place, name: name != MARK and there(place, name))
    with pytest.raises(UsageError, match="another job's"):
        owned(tmp_path / "b", shared)
    assert [path.name for path in shared.iterdir()] == [MARK]


def test_a_place_for_snapshots_belongs_to_one_job_permanently(tmp_path: Path) -> None:
    shared = tmp_path / "shared" / "snapshots"
    first = owned(tmp_path / "first", shared)
    first.own(Files(shared))  # each start checks again
    with pytest.raises(UsageError, match=f"the snapshots in {shared} are another job's.*--snapshots"):
        owned(tmp_path / "second", shared)
    first.own(Files(shared))


def test_a_place_that_lacks_this_job_s_mark_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "mounted" / "snapshots"
    run = owned(tmp_path / "run", place)
    moved = place.rename(tmp_path / "elsewhere")
    for there in (place, tmp_path / "run" / "snapshots"):
        with pytest.raises(
            MachineError, match=r"does not hold the snapshots of this job; nothing was started\. Mount it"
        ):
            run.own(Files(there))
        assert not there.exists()
    run.own(Files(moved))


def test_a_run_directory_that_lost_its_name_takes_it_from_its_own_snapshots_only(tmp_path: Path) -> None:
    for snapshots, adopted in ((tmp_path / "run" / "snapshots", True), (tmp_path / "outside" / "snapshots", False)):
        run = owned(tmp_path / "run", snapshots)
        (run.root / "job").unlink()
        if adopted:
            run.own(Files(snapshots))
            (run.root / "job").unlink()
        else:
            with pytest.raises(UsageError, match="another job's"):
                run.own(Files(snapshots))


def test_directories_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "below"  # even root cannot make it a directory
    with pytest.raises(MachineError, match=r"run directory .*below cannot be written \(Not a directory\).*--run-dir"):
        RunDirectory(blocked).take()
    writable(Files(tmp_path / "new" / "snapshots"))
    assert list((tmp_path / "new" / "snapshots").iterdir()) == []
    with pytest.raises(
        MachineError, match=r"below cannot be written \(.*file: File exists\); nothing was started.*--snapshots"
    ):
        writable(Files(blocked))


def test_a_copied_run_directory_uses_its_own_snapshots(tmp_path: Path) -> None:
    """The journal says where the snapshots were before."""
    run = RunDirectory(tmp_path / "run")
    run.take()
    run.own(Files(run.root / "snapshots"))
    Journal(run.journal).write("start", 0.0, snapshots=str(run.root))
    run.release()
    shutil.copytree(run.root, tmp_path / "copy")
    assert RunDirectory(tmp_path / "copy").kept() == Files(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "snapshots")
    assert RunDirectory(tmp_path / "copy").kept() == Files(run.root)
