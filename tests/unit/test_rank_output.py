"""What the agent keeps of its ranks' output, and passes on."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.cli import logs
from mt_resilient.agent.config import AgentPolicy
from mt_resilient.agent.ranks import rank_logs, rank_output
from mt_resilient.agent.ranks.rank_logs import RankLogs, older
from mt_resilient.agent.ranks.rank_output import RankOutput
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.report.journal import Journal


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads may take long on a busy machine."""
    monkeypatch.setattr(rank_output, "LAST_S", 60.0)
    monkeypatch.setattr(rank_output, "_POLL_MS", 60_000)


def rank_prints(output: RankOutput, rank: int, data: bytes, stream: int = 0) -> None:
    descriptor = os.open(output.handed[stream].paths[rank], os.O_WRONLY)
    os.write(descriptor, data)
    os.close(descriptor)


def test_the_console_has_the_same_bytes_and_each_rank_has_its_file(tmp_path: Path, capfdbinary: Any) -> None:
    output = RankOutput(tmp_path, 2, 1.0)
    output.begin(7, 1)
    rank_prints(output, 0, b"\x1b[31mred\xff\n", stream=1)
    rank_prints(output, 1, b"one", stream=1)
    rank_prints(output, 1, b"Segmentation fault\n")
    output._settle(30)
    rank_prints(output, 1, b" and two", stream=1)
    ended = SimpleNamespace(ended_s=1.0, last_lines="")
    output.tell(SimpleNamespace(ranks={1: ended}))  # type: ignore[arg-type]
    output.finish()
    seen = capfdbinary.readouterr()
    assert sorted(seen.out.splitlines(keepends=True)) == sorted(
        b"\x1b[31mred\xff\none and two".splitlines(keepends=True)
    )
    assert seen.err == b"Segmentation fault\n"
    folder = tmp_path / "ranks" / "generation-0007"
    assert (folder / "rank-00002.log").read_bytes() == b"\x1b[31mred\xff\n"
    assert (folder / "rank-00003.log").read_bytes() == b"Segmentation fault\none and two", "a line stays whole"
    assert ended.last_lines == "Segmentation fault", "what stderr has is preferred"


def test_a_file_does_not_grow_without_end_and_keeps_the_newest(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "_MOST", 1 << 20)
    output = RankOutput(tmp_path, 1, 0.1)
    for generation in range(1, 23):
        output.begin(generation, 0)
    for number in range(1000):
        rank_prints(output, 0, b"%04d %s\n" % (number, b"x" * 495))
    output.finish()
    capfd.readouterr()
    newest = tmp_path / "ranks" / "generation-0022" / "rank-00000.log"
    kept = older(newest).read_bytes() + newest.read_bytes()
    assert kept.endswith(b"0999 " + b"x" * 495 + b"\n")
    assert 50_000 < len(kept) <= 100_000 + 2 * (1 << 16)
    assert len([*(tmp_path / "ranks").iterdir()]) == 20, "the oldest generations go"


def test_nothing_is_kept_and_nothing_runs_unless_somebody_wants_it(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    output = RankOutput(tmp_path, 2, AgentPolicy().rank_log_mb)
    output.begin(1, 0)
    assert not [each for each in set(threading.enumerate()) - threads if each.name == "rank output"]
    output.finish()
    assert (output.handed, output.paths, [*tmp_path.iterdir()]) == ((), [], [])
    with pytest.raises(UsageError, match=r"contains no output of ranks.*--set agent\.rank_log_mb=64"):
        logs.logs(RunDirectory(tmp_path), None, None, 1, follow=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    Journal(tmp_path / "journal.jsonl").write("start", 1.0)
    for generation, rank, text in ((1, 0, b"a\nb\n"), (2, 0, b"c\nd\n"), (2, 1, b"e\n\xff\x1b[0m torn")):
        folder = tmp_path / "logs" / "ranks" / f"generation-{generation:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{rank:05d}.log").write_bytes(text)
    return RunDirectory(tmp_path)


def test_the_last_lines_of_the_newest_generation_are_shown(run: RunDirectory, capfdbinary: Any) -> None:
    older(run.logs / "ranks/generation-0002/rank-00000.log").write_bytes(b"before\n")
    assert logs.logs(run, None, None, 1, follow=False) == 0
    shown = capfdbinary.readouterr().out
    assert shown == b"==> generation 2, rank 0 <==\nd\n==> generation 2, rank 1 <==\n\xff\x1b[0m torn\n"
    assert logs.logs(run, 0, None, 3, follow=True) == 0, "no agent runs, so nothing follows"
    assert capfdbinary.readouterr().out == b"==> generation 2, rank 0 <==\nbefore\nc\nd\n"
    assert logs.logs(run, 0, None, 0, follow=False) == 0
    assert capfdbinary.readouterr().out == b"==> generation 2, rank 0 <==\nbefore\nc\nd\n"
    with pytest.raises(UsageError, match="no output of rank 5; known are ranks 0 to 1"):
        logs.logs(run, 5, None, 1, follow=False)
    with pytest.raises(UsageError, match="no incident 3"):
        logs.logs(run, None, "3", 1, follow=False)


def test_files_that_the_agent_removes_meanwhile_are_left_out(
    run: RunDirectory, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = logs._logs(run)
    monkeypatch.setattr(logs, "_logs", lambda _: [*found, logs.RankLog(2, 2, run.root / "gone")])
    logs.logs(run, None, None, 1, follow=True)
    assert capfdbinary.readouterr().out.endswith(b" torn\n==> generation 2, rank 2 <==\n")


def test_the_output_of_nodes_whose_directories_lie_beside_this_one_is_shown_too(
    tmp_path: Path, capfdbinary: Any
) -> None:
    for rank in (0, 1):
        folder = tmp_path / f"nodes/{rank}-host/logs/ranks/generation-0001"
        folder.mkdir(parents=True)
        (folder / f"rank-{rank:05d}.log").write_bytes(b"a\n")
        (tmp_path / f"nodes/{rank}-host/job").write_text("one job")
        Journal(tmp_path / f"nodes/{rank}-host/journal.jsonl").write("start", 1.0)
    logs.logs(RunDirectory(tmp_path / "nodes/0-host"), None, None, 1, follow=False)
    shown = capfdbinary.readouterr().out
    assert shown == b"==> generation 1, rank 0 <==\na\n==> generation 1, rank 1 <==\na\n"


def test_what_is_appended_is_followed_across_the_two_halves_of_a_file(run: RunDirectory) -> None:
    path = run.logs / "ranks/generation-0002/rank-00000.log"
    log, places = logs.RankLog(2, 0, path), {}
    places[log] = (path.stat().st_ino, path.stat().st_size)
    with path.open("ab") as file:
        file.write(b"f\nunfini")
    assert logs._appended(log, places) == [b"f\n"]
    with path.open("ab") as file:
        file.write(b"shed\n")
    path.replace(older(path))
    path.write_bytes(b"g\n")
    assert logs._appended(log, places) == [b"unfinished\n", b"g\n"]
    assert logs._appended(log, places) == []


def test_a_disk_that_hangs_holds_up_no_rank(tmp_path: Path, capfdbinary: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(rank_logs, "_full", lambda folder: not goes_on.wait())
    output = RankOutput(tmp_path, 1, 1.0)
    output.begin(1, 0)
    for _ in range(100):
        rank_prints(output, 0, b"x" * 10_000 + b"\n")
    output.tell(SimpleNamespace(ranks={}))  # type: ignore[arg-type]
    output._settle(30)
    assert len(capfdbinary.readouterr().err) == 1_000_100
    goes_on.set()
    output.finish()


def kept(logs: RankLogs, folder: Path) -> bytes:
    logs.thread.start()
    logs.end()
    logs.thread.join()
    return (folder / "generation-0001" / "rank-00000.log").read_bytes()


def test_what_the_disk_did_not_take_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "_MOST", 3)
    logs = RankLogs(tmp_path, 1, 1000)
    logs.begin(1, 0)
    for line in (b"one\n", b"two\n", b"lost\n"):
        logs.keep(0, line)
    monkeypatch.setattr(rank_logs, "_MOST", 4)
    for line in (b"three\n", b"lost, too\n"):
        logs.keep(0, line)
    gaps = [b"\n[mt-resilient: %d bytes are missing here, because the disk was slow]\n" % lost for lost in (5, 10)]
    assert kept(logs, tmp_path) == b"one\ntwo\n" + gaps[0] + b"three\n" + gaps[1]


def test_a_new_run_whose_numbers_begin_anew_keeps_its_own_output_and_logs_shows_that(
    run: RunDirectory, capfdbinary: Any
) -> None:
    folder = run.logs / "ranks"
    for generation in range(3, 31):
        (folder / f"generation-{generation:04d}").mkdir()
    for path in (*folder.glob("*/*"), *folder.iterdir()):
        os.utime(path, (1.0, 1.0))
    logs_now = RankLogs(folder, 1, 1000)
    logs_now.begin(1, 0)
    logs_now.keep(0, b"new\n")
    assert kept(logs_now, folder) == b"new\n"
    assert len([*folder.iterdir()]) == 20
    logs.logs(run, None, None, 1, follow=True)
    assert capfdbinary.readouterr().out == b"==> generation 1, rank 0 <==\nnew\n"


def test_all_files_together_have_a_limit_and_a_disk_that_is_nearly_full_gets_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "_TOTAL_BYTES", 1000)
    for number, at_s in ((7, 1.0), (8, 2.0), (9, 3.0)):
        folder = tmp_path / f"generation-{number:04d}"
        folder.mkdir()
        (folder / "rank-00000.log").write_bytes(b"x" * 400)
        os.utime(folder, (at_s, at_s))
    disk = iter((False, True, True, False))
    monkeypatch.setattr(rank_logs, "_full", lambda folder: next(disk))
    logs = RankLogs(tmp_path, 1, 1000)
    logs.begin(1, 0)
    for line in (b"one\n", b"two\n", b"three\n", b"four\n"):
        logs.keep(0, line)
    gap = b"\n[mt-resilient: output is missing here: less than 5 % of the disk and less than 10 GB were free]\n"
    assert kept(logs, tmp_path) == b"one\n" + gap + b"four\n"
    assert sorted(each.name[-1] for each in tmp_path.iterdir()) == ["1", "8", "9"], "the oldest goes"


@pytest.mark.parametrize(("free", "blocks", "full"), [(4, 100, True), (6, 100, False), (4_000_000, 100_000_000, False)])
def test_a_disk_is_nearly_full_if_a_small_share_and_few_bytes_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, blocks: int, full: bool
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_blocks=blocks, f_frsize=4096))
    assert rank_logs._full(tmp_path) is full


RANK = """
import os, sys
stream = os.open(sys.argv[1], os.O_WRONLY)
for number in range(1500):
    os.write(stream, b"%07d " % number + b"x" * 91 + b"\\n")
"""


def test_a_reader_that_has_stopped_loses_nothing_when_the_job_ends(tmp_path: Path) -> None:
    program = f"""
import subprocess, sys, time
from pathlib import Path
from mt_resilient.agent.ranks.rank_output import RankOutput
output = RankOutput(Path({str(tmp_path)!r}), 1, 64.0)
output.begin(1, 0)
rank = subprocess.Popen([sys.executable, "-c", {RANK!r}, output.handed[-1].paths[0]])
while not output._by_rank[0][-1].last:
    time.sleep(0.01)
output.finish()
"""
    agent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert agent.wait(60) == 0
    assert agent.stdout
    printed = agent.stdout.read().splitlines()
    agent.stdout.close()
    assert [int(line[:7]) for line in printed] == [*range(1500)]
