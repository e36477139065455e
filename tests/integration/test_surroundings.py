"""What an agent may find around it: a terminal that is closed or stopped, signals that are ignored, a kernel that refuses something."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mt_resilient.resilience.report.journal import Journal

from ..harness import BIN, GATED, MINIMAL, ROOT, Job, digest_of, environment, step_lines, undisturbed

UNTIDY = ROOT / "tests" / "chaos" / "untidy.py"
PROBE = """
import json, os, signal, sys, time
names = ("SigBlk", "SigIgn")
found = {line.split(":")[0]: int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith(names)}
found["fds"] = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in sorted(map(int, os.listdir("/proc/self/fd")))[:3]}
print("said by the rank", flush=True)
with open(sys.argv[1] + ".part", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".part", sys.argv[1])
while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""
IGNORED_WITHOUT_HARM = {signal.SIGUSR1, signal.SIGUSR2}
"""That ranks ignore under us: a scheduler's word to all processes of a job."""


def until(what: Callable[[], bool], deadline_s: float = 300) -> None:
    end = time.monotonic() + deadline_s
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def run_in_shell(place: Path, before: str, words: str, *options: str, **extra: str) -> subprocess.Popen[bytes]:
    """`mt-resilient run` as a shell starts it after `before`; words: of torchrun, with redirections behind them."""
    ours = f"{BIN}/mt-resilient run --run-dir {place}/run --metrics-port 0 {' '.join(options)} -- torchrun {words}"
    return subprocess.Popen(["sh", "-c", f"{before}\nexec {ours}"], env=environment(**extra))


@pytest.mark.variant
def test_started_with_nohup_and_without_stdout(tmp_path: Path) -> None:
    """Signals that are ignored stay so, and no file of ours becomes the ranks' stdout."""
    script, told, gate, plain = (tmp_path / name for name in ("probe.py", "told", "gate", "plain"))
    script.write_text(PROBE)
    words = f"--nproc-per-node 1 {script} {told} {gate} 2>{tmp_path}/errors >&- <&-"
    agent = run_in_shell(tmp_path, "trap '' HUP INT TERM", words, "--no-warm")
    until(told.exists)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        agent.send_signal(number)
    time.sleep(0.5)
    gate.touch()
    assert agent.wait(60) == 0, (tmp_path / "errors").read_text()
    assert "SIGTERM is ignored, because" in (tmp_path / "errors").read_text()
    found = json.loads(told.read_text())
    assert (found["fds"]["0"], found["fds"]["1"]) == ("/dev/null", "/dev/null")
    assert found["fds"]["2"] == str(tmp_path / "errors")
    command = f"trap '' HUP INT TERM; exec {BIN}/torchrun --nproc-per-node 1 {script} {plain} 2>/dev/null"
    subprocess.run(["sh", "-c", command], env=environment(), check=True, timeout=60)
    expected = json.loads(plain.read_text())
    allowed = sum(1 << number - 1 for number in IGNORED_WITHOUT_HARM)
    assert (found["SigIgn"] & ~allowed, found["SigBlk"]) == (expected["SigIgn"], expected["SigBlk"])


@pytest.mark.parametrize("warm", [[], pytest.param(["--no-warm"], marks=pytest.mark.variant)], ids=["warm", "cold"])
def test_what_a_killed_rank_leaves_behind_is_put_away(tmp_path: Path, warm: list[str]) -> None:
    made, left = tmp_path / "made", tmp_path / "left"
    job = Job(tmp_path, ["--nproc-per-node", "1", str(UNTIDY), str(made), str(left)], *warm)
    until(made.exists)
    assert len(json.loads(made.read_text())) == 3
    until(lambda: not job.zombies())
    job.kill_rank(0)
    assert job.finish() == 0, job.said()
    assert json.loads(left.read_text()) == []
    assert [incident.cause for incident in job.faults()] == ["rank_killed"]


@pytest.mark.variant
def test_a_stderr_that_takes_nothing_ends_no_rank(tmp_path: Path) -> None:
    """Its disk is full, say. The script prints nothing there; we do."""
    script = tmp_path / "script.py"
    loop = "from torch import nn\nfrom mt_resilient import Session\nfor step in Session(model=nn.Linear(2, 2)).steps(2): pass\n"
    script.write_text(loop)
    agent = run_in_shell(tmp_path, "", f"{script} 2>/dev/full", "--no-warm")
    assert agent.wait(120) == 0


class Refused(Job):
    """By a kernel that knows some calls only."""

    def start(self) -> None:
        refusing = str(ROOT / "tests" / "chaos" / "refusing.py")
        self.command = [sys.executable, refusing, "pidfd_open,pidfd_send_signal,memfd_create", *self.command]
        super().start()


@pytest.mark.variant
def test_a_kernel_without_pidfds_and_memory_files(tmp_path: Path) -> None:
    expected = undisturbed(MINIMAL, "--steps", "60")
    script = [str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Refused(tmp_path, ["--nproc-per-node", "2", *script])
    job.until_step(20)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.stepped_s > 0)
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert "refuses pidfd_open here: the agent looks for ended ranks in /proc" in job.said()
    assert "refuses memfd_create here: snapshots in memory lie in /dev/shm" in job.said()
    (incident,) = job.faults()
    assert (incident.cause, incident.lost_steps <= 2) == ("rank_killed", True)


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ([sys.executable, str(ROOT / "tests" / "chaos" / "refusing.py"), "prctl"], "prctl(PR_SET_CHILD_SUBREAPER)"),
        (["unshare", "-pf", "--kill-child"], "/proc is not mounted, or belongs to another PID namespace"),
    ],
    ids=["prctl", "proc"],
)
def test_what_cannot_be_done_without_is_said_at_the_start(tmp_path: Path, before: list[str], sentence: str) -> None:
    if before[0] == "unshare" and subprocess.run([*before, "true"], check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    script = tmp_path / "script.py"
    script.touch()
    words = ["run", "--run-dir", str(tmp_path / "run"), "--metrics-port", "0", "--", "torchrun", str(script)]
    done = subprocess.run([*before, BIN / "mt-resilient", *words], env=environment(), capture_output=True, text=True)
    assert done.returncode == 3
    (said,) = done.stderr.splitlines()
    assert sentence in said
    assert "nothing was started" in said


@pytest.mark.parametrize("limit", ["-n 64", "-f 1024"])
def test_limits_that_keep_etcd_from_running_are_named(tmp_path: Path, limit: str) -> None:
    script = tmp_path / "script.py"
    script.touch()
    words = [str(BIN / "mt-resilient"), "run", "--run-dir", str(tmp_path / "run"), "--metrics-port", "0"]
    limited = ["bash", "-c", f'ulimit {limit}; exec "$@"', "limited", *words, "--", "torchrun", str(script)]
    done = subprocess.run(limited, env=environment(), capture_output=True, text=True)
    assert done.returncode == 3
    assert f"raise ulimit {limit.split()[0]}, or name an etcd of your own with --etcd" in done.stderr


@pytest.mark.variant
def test_a_terminal_that_nobody_reads_holds_up_nobody(tmp_path: Path) -> None:
    """As after Ctrl-S, or where a pipe's reader has stopped."""
    script, told = tmp_path / "probe.py", tmp_path / "told"
    script.write_text(PROBE)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    words = ["run", "--run-dir", str(tmp_path / "run"), "--metrics-port", "0", "--no-warm", "--", "torchrun"]
    agent = subprocess.Popen(
        [f"{BIN}/mt-resilient", *words, str(script), str(told)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=writing,
    )
    assert agent.wait(60) == 0
    assert told.exists()
    assert [line["kind"] for line in Journal(tmp_path / "run" / "journal.jsonl").read()][-1] == "end"
    os.close(reading)
    os.close(writing)


def in_a_namespace(place: Path, options: str) -> str:
    """The path of a wrapper that runs Python in PID namespaces of its own."""
    if subprocess.run(["unshare", "-pf", "--kill-child", "--mount-proc", "true"], check=False).returncode:
        pytest.skip("no PID namespace can be made here")
    wrapper = place / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec unshare {options} --kill-child --mount-proc {sys.executable} -u "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


@pytest.mark.variant
def test_ranks_in_pid_namespaces_of_their_own(tmp_path: Path) -> None:
    """Each is process 1 of its own, and sees no agent."""
    expected = undisturbed(MINIMAL, "--steps", "60")
    wrapper = in_a_namespace(tmp_path, "-pf")
    script = [wrapper, str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Job(tmp_path, ["--nproc-per-node", "2", "--no-python", *script])
    job.until_step(20)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.stepped_s > 0)
    assert job.finish() == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    (incident,) = job.faults()
    assert (incident.cause, incident.lost_steps <= 2) == ("rank_killed", True)


def test_a_rank_that_no_way_leads_from_to_its_agent_runs_as_ever(tmp_path: Path) -> None:
    script, told = tmp_path / "probe.py", tmp_path / "told"
    loop = "from torch import nn\nfrom mt_resilient import Session\nlist(Session(model=nn.Linear(2, 2)).steps(2))\n"
    script.write_text(PROBE + loop)
    words = ["--nproc-per-node", "1", "--no-python", in_a_namespace(tmp_path, "-pfn"), str(script), str(told)]
    job = Job(tmp_path, words, "--no-warm")
    assert job.finish() == 0, job.said()
    assert told.exists()
    assert job.said().count("rank 0 does not reach its agent") == 1
    assert job.faults() == []
