"""What ranks print: on the console the same as under plain torchrun, in a file for each rank, and of a dead rank in its incident."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory

from ..harness import BIN, cli, environment, faults

KEEP = ("--set", "agent.rank_log_mb=64")
SCRIPT = """
import os, sys, time
import torch
import mt_resilient
rank, here = os.environ["RANK"], sys.argv[1]
size = os.get_terminal_size() if os.isatty(1) else ""
# In one piece, because both ranks write to one pipe.
print(f"{rank} terminal {os.isatty(1)} {os.isatty(2)} {size}\\n", end="")
print(f"{rank} \\x1b[31mred\\x1b[0m\\n", end="", file=sys.stderr)
os.write(1, rank.encode() + b" raw \\xff bytes\\n")
os.system(f"echo {rank} from a child")
if rank == "0":  # others that write meanwhile could tear a line that a pipe does not take at once
    while not os.path.exists(here + ".quiet"):
        time.sleep(0.02)
    print(rank, "x" * 100000, flush=True)
    open(here + ".long", "w").close()
else:
    open(here + ".quiet", "w").close()
    while not os.path.exists(here + ".long"):
        time.sleep(0.02)
if rank == "1" and os.environ.get("CRASH") and not os.path.exists(here):
    open(here, "w").close()
    time.sleep(1)
    print("rank 1: \\x1b[2Jlibwhatever: assertion failed", file=sys.stderr)
    os.abort()
while rank == "0" and os.environ.get("CRASH") and not os.path.exists(here + ".again"):
    time.sleep(0.02)  # it comes to its end in its second life alone
open(here + ".again", "w").close()
time.sleep(2)
print(f"{rank} end\\n", end="")
"""


def ran(place: Path, ours: bool, *options: str, **extra: str) -> tuple[bytes, bytes, Path]:
    script, run = place / "script.py", place / "run"
    script.write_text(SCRIPT)
    words = [str(BIN / "torchrun"), "--nproc-per-node", "2", *options, str(script), str(place / "crashed")]
    if ours:
        words = [str(BIN / "mt-resilient"), "run", "--run-dir", str(run), "--metrics-port", "0", *KEEP, "--", *words]
    done = subprocess.run(words, env=environment(**extra), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr, run / "logs" / "ranks" / "generation-0001"


def lines(output: bytes) -> list[bytes]:
    return sorted(output.splitlines())


def test_the_console_and_the_files_have_what_the_ranks_print(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    plain, plain_errors, _ = ran(tmp_path / "plain", False)
    printed, errors, folder = ran(tmp_path, True)
    assert lines(printed) == lines(plain)
    assert {line for line in lines(plain_errors) if b"red" in line} <= {*lines(errors)}
    for rank in (b"0", b"1"):
        kept = (folder / f"rank-0000{rank.decode()}.log").read_bytes()
        assert lines(kept) == [line for line in lines(plain + plain_errors) if line.startswith(rank + b" ")]


def test_what_a_rank_printed_before_it_died_is_in_its_incident(tmp_path: Path) -> None:
    printed, _, _ = ran(tmp_path, True, CRASH="1")
    assert lines(printed).count(b"0 end") == 1
    run = RunDirectory(tmp_path / "run")
    (incident,) = faults(run.root)
    number = next(number for number, each in explain.incidents(run).items() if each == incident)
    assert any("libwhatever: assertion failed" in said for said in incident.evidence)
    told = cli("explain", "--run-dir", str(run.root)).stdout
    assert "\\x1b[2Jlibwhatever: assertion failed" in told, "no rank's output may change the terminal of who reads it"
    shown = cli("logs", "--run-dir", str(run.root), "--incident", number, "--rank", "1", "--lines", "1").stdout
    assert shown == "==> generation 1, rank 1 <==\nrank 1: \x1b[2Jlibwhatever: assertion failed\n"


@pytest.mark.variant
def test_what_torchrun_redirects_stays_redirected(tmp_path: Path) -> None:
    logged = tmp_path / "torchrun"
    printed, _, folder = ran(tmp_path, True, "--redirects", "1:3", "--log-dir", str(logged))
    assert not [line for line in lines(printed) if line.startswith(b"1 ")]
    assert [path.read_bytes().count(b"1 end") for path in logged.rglob("1/stdout.log")] == [1]
    assert (folder / "rank-00001.log").read_bytes() == b""
    assert b"0 end" in (folder / "rank-00000.log").read_bytes()


@pytest.mark.variant
def test_ranks_of_a_job_in_a_terminal_have_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ours, theirs = pty.openpty()
    subprocess.run(["stty", "rows", "33", "cols", "101"], stdin=theirs, check=True)
    words = [BIN / "mt-resilient", "run", "--run-dir", tmp_path / "run", "--metrics-port", "0", *KEEP]
    words += ["--", BIN / "torchrun"]
    words += ["--nproc-per-node", "2", script, tmp_path / "crashed"]
    job = subprocess.Popen(words, env=environment(), stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:
            break
    assert job.wait(60) == 0, seen[-2000:]
    assert seen.count(b"terminal True True os.terminal_size(columns=101, lines=33)") == 2
    assert seen.count(b"x" * 100000 + b"\r\n") == 1


@pytest.mark.variant
def test_a_process_that_the_script_leaves_behind_goes_on_printing(tmp_path: Path) -> None:
    script, late = tmp_path / "left.py", "sleep 12; echo late; echo late error >&2; sleep 1; echo later"
    script.write_text(
        "import os, subprocess, mt_resilient\n"
        f'if os.environ["RANK"] == "0": subprocess.Popen(["sh", "-c", {late!r}], start_new_session=True)\n'
    )
    words = [
        BIN / "mt-resilient",
        "run",
        "--run-dir",
        tmp_path / "run",
        "--metrics-port",
        "0",
        *KEEP,
        "--",
        BIN / "torchrun",
        script,
    ]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, "late error\n" in done.stderr) == ("late\nlater\n", True)
