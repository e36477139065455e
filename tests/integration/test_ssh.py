"""Agents on several hosts through a real sshd: what is said, how it ends, and what a broken connection brings about. A stand-in takes the
agents' place."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.model.cluster_state import World
from mt_resilient.resilience.report.journal import Journal

from ..harness import BIN, GATED, MINIMAL, cli, digest_of, environment, step_lines
from ..sshd import PROGRAM, Sshd

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no sshd: apt-get install openssh-server")

STAND_IN = Path(__file__).with_name("stand_in_agent.py")
DRIVE = """
import json, os, sys
from mt_resilient.agent.ssh.hostfile import parse
from mt_resilient.agent.ssh.ssh import SshLaunch, Start
from mt_resilient.agent.output.terminal import Terminal
from mt_resilient.resilience.errors import ResilientError

text, options, agents, least = json.loads(sys.argv[1])
launch = SshLaunch(
    parse(text, "hosts"),
    Start(
        options, lambda host: [sys.executable, *agents[host.node]],
        {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "MT_RESILIENT_"))},
    ),
    least, 30.0, Terminal(),
)
try:
    sys.exit(launch.run())
except ResilientError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    server = Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


class Launch:
    """The launcher in a process of its own, in `place`."""

    def __init__(
        self, place: Path, sshd: Sshd, hosts: str, least: int, *, files: str = "", output: int = -1, **agents: str
    ) -> None:
        """files: how many it may have open, as SOFT:HARD; output: a descriptor for it."""
        self.place = place
        commands = {node: [str(STAND_IN), node, *words.split()] for node, words in agents.items()}
        told = json.dumps([hosts, sshd.options, commands, least])
        limited = ["prlimit", f"--nofile={files}"] if files else []
        self.output, self.errors = place / "output", place / "errors"
        with self.output.open("wb") as file, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*limited, sys.executable, "-c", DRIVE, told],
                cwd=place,
                env=environment(NCCL_TEST_WORD="a word"),
                stdout=output if output >= 0 else file,
                stderr=errors,
            )

    def until(self, *files: str) -> None:
        ends = time.monotonic() + 120
        while not all((self.place / name).exists() and (self.place / name).read_text() for name in files):
            assert time.monotonic() < ends, self.errors.read_text()
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.02)

    def pid(self, node: str) -> int:
        return int((self.place / f"{node}.pid").read_text())

    def end(self) -> tuple[int, str, str]:
        code = self.process.wait(180)
        return code, self.output.read_text(), self.errors.read_text()


def gone(pid: int, within_s: float = 60) -> None:
    ends = time.monotonic() + within_s
    while psutil.pid_exists(pid):
        assert time.monotonic() < ends, psutil.Process(pid).cmdline()
        time.sleep(0.05)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def ssh_to(launch: Launch, host: str) -> psutil.Process:
    return next(child for child in psutil.Process(launch.process.pid).children() if host in child.cmdline())


def test_each_line_comes_back_behind_its_node_and_the_code_is_the_job_s(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo slots=2", 2, one="exit 5", two="exit 5")
    code, output, errors = launch.end()
    assert code == 5
    for node in ("one", "two"):
        assert f"{node}: in {tmp_path} with a word\n" in output
        assert f"{node}: and on stderr\n" in errors
        assert f"the agent on {node} has exited with code 5" in errors
    assert all(line.startswith(("one: ", "two: ")) for line in output.splitlines())


def test_a_host_whose_shell_prints_something_without_an_end_of_line(tmp_path: Path) -> None:
    """As a .bashrc does that sets the title of a window."""
    sshd = Sshd(tmp_path, r"""ForceCommand printf '\033]0;host\007'; eval "$SSH_ORIGINAL_COMMAND" """)
    try:
        code, output, _ = Launch(tmp_path, sshd, "one", 1, one="exit 5").end()
    finally:
        sshd.stop()
    assert (code, f"one: in {tmp_path} with a word\n" in output) == (5, True)


def test_one_ctrl_c_ends_all(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo", 2, one="wait", two="wait")
    launch.until("one.pid", "two.pid")
    launch.process.send_signal(signal.SIGINT)
    code, output, errors = launch.end()
    assert code == 130
    assert {"one: heard SIGINT", "two: heard SIGINT"} <= set(output.splitlines())
    assert "SIGINT: all agents were told; a second signal ends them at once" in errors


def test_whoever_does_not_read_holds_up_nothing(tmp_path: Path, sshd: Sshd) -> None:
    reading, writing = os.pipe()
    launch = Launch(tmp_path, sshd, "one", 1, output=writing, one="talk")
    os.close(writing)
    launch.until("one.pid")
    ends = time.monotonic() + 60
    while (
        int.from_bytes(fcntl.ioctl(reading, termios.FIONREAD, bytes(4)), sys.byteorder) < 56 << 10
    ):  # a pipe takes 64 KiB
        assert time.monotonic() < ends
        time.sleep(0.02)
    time.sleep(0.5)
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(180) == 130, launch.errors.read_text()
    assert (tmp_path / "one.heard").read_text() == "SIGINT"
    os.close(reading)


@pytest.mark.parametrize(("files", "enough"), [("24:4096", True), ("24:24", False)])
def test_more_hosts_than_files_may_be_open(tmp_path: Path, sshd: Sshd, files: str, enough: bool) -> None:
    nodes = [f"n{number}" for number in range(10)]
    launch = Launch(
        tmp_path, sshd, "\n".join(f"{node} port=1" for node in nodes), 1, files=files, **dict.fromkeys(nodes, "wait")
    )
    code, _, errors = launch.end()
    assert code == 3
    assert "Traceback" not in errors
    assert ("n9 cannot be used" in errors) is enough
    assert ("can be started (Too many open files); the " in errors) is not enough


def test_a_second_ctrl_c_is_handed_on_too(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one", 1, one="deaf")
    launch.until("one.pid")
    launch.process.send_signal(signal.SIGINT)
    launch.until("one.heard")
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 130
    assert (tmp_path / "one.heard").read_text() == "SIGINT SIGINT"


def test_a_scheduler_s_word_goes_through_as_it_is(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one", 1, one="wait")
    launch.until("one.pid")
    launch.process.send_signal(signal.SIGUSR1)
    assert launch.end()[0] == 128 + signal.SIGUSR1
    assert (tmp_path / "one.heard").read_text() == "SIGUSR1"


def test_a_host_that_cannot_be_reached_is_named_and_done_without(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo port=1", 1, one="exit 0", two="exit 0")
    code, output, errors = launch.end()
    assert code == 0
    assert (
        "two cannot be used (ssh: connect to host 127.0.0.1 port 1: Connection refused); the job runs without it"
        in errors
    )
    assert "one: in " in output


def test_without_enough_hosts_the_others_are_told_to_leave(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo port=1", 2, one="wait", two="wait")
    code, _, errors = launch.end()
    assert code == 3
    assert "the job needs 2 of the 2 hosts, but two cannot be used; the other agents were told to exit" in errors


def test_a_working_directory_that_a_host_does_not_have(tmp_path: Path) -> None:
    order = {"hello": "hello", "folder": str(tmp_path / "gone"), "environment": {}, "command": ["true"]}
    far = [sys.executable, "-P", "-m", "mt_resilient.agent.ssh.ssh_remote"]
    done = subprocess.run(far, input=json.dumps(order) + "\n", capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"the working directory {tmp_path / 'gone'} is not there (No such file or directory)\n"


def test_a_far_end_that_is_told_nothing_starts_nothing() -> None:
    far = [sys.executable, "-P", "-m", "mt_resilient.agent.ssh.ssh_remote"]
    assert subprocess.run(far, input=b"", timeout=60).returncode == 3


def test_silence_is_taken_for_the_end_and_one_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    wait = [sys.executable, str(STAND_IN), "one", "deaf"]
    order = {
        "hello": "hello",
        "folder": str(tmp_path),
        "environment": {},
        "command": wait,
        "silence_s": 4.0,
        "ending_s": 5.0,
    }
    far = [sys.executable, "-P", "-m", "mt_resilient.agent.ssh.ssh_remote"]
    with subprocess.Popen(far, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdin
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        while not (tmp_path / "one.pid").exists():  # it listens to signals
            process.stdin.write("\n")
            process.stdin.flush()
            time.sleep(0.2)
        assert process.wait(180) == 128 + signal.SIGTERM
    assert (tmp_path / "one.heard").read_text() == "SIGTERM SIGTERM"


def test_ctrl_z_does_not_make_it_silent(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one", 1, one="wait")
    launch.until("one.pid")
    launch.process.send_signal(signal.SIGTSTP)
    launch.process.send_signal(signal.SIGINT)
    assert launch.end()[0] == 130


def test_an_agent_whose_launcher_is_killed_ends_as_when_its_machine_is_taken_away(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo", 2, one="wait", two="talk")
    launch.until("one.pid", "two.pid")
    launch.process.kill()
    launch.process.wait()
    for node in ("one", "two"):
        gone(launch.pid(node))
        assert (tmp_path / f"{node}.heard").read_text() == "SIGTERM"


def test_one_broken_connection_is_told_and_the_others_go_on(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo", 2, one="wait", two="wait")
    launch.until("one.pid", "two.pid")
    os.kill(ssh_to(launch, "two").pid, signal.SIGKILL)
    gone(launch.pid("two"))
    assert psutil.pid_exists(launch.pid("one"))
    launch.process.send_signal(signal.SIGINT)
    code, _, errors = launch.end()
    assert code == 130
    assert (
        "two is lost: its ssh process was ended by SIGKILL; the other nodes continue if the job can do without it"
        in errors
    )
    assert f"give this command there to bring it back: cd {tmp_path} && {sys.executable} {STAND_IN} two wait" in errors


def test_an_agent_that_is_killed_is_told(tmp_path: Path, sshd: Sshd) -> None:
    launch = Launch(tmp_path, sshd, "one\ntwo", 2, one="wait", two="exit 7")
    launch.until("one.pid", "two.pid")
    os.kill(launch.pid("one"), signal.SIGKILL)
    code, _, errors = launch.end()
    assert code == 7
    assert "one is lost: its agent was killed" in errors


HELD = """import os, runpy, sys
os.environ.update(GATE={gate!r}, GATE_AFTER="30")
runpy.run_path({gated!r}, run_name="__main__")
"""


class Real:
    """`mt-resilient run --hostfile` itself, on two hosts with a rank each."""

    def __init__(self, place: Path, sshd: Sshd, steps: int, *options: str, b: str = "", held: bool = False) -> None:
        """held: its ranks wait at their 30th step for `place / "gate"`."""
        (script := place / "held.py").write_text(HELD.format(gate=str(place / "gate"), gated=str(GATED)))
        (place / "hosts").write_text(f"a slots=1\nb slots=1 rack=r1 {b}\n")
        through = [word for option in sshd.options for word in ("--ssh-option", option)]
        fixed = ["--hostfile", "hosts", "--run-dir", "run", "--metrics-port", "0", *through, *options]
        held_by = [str(script)] if held else []
        train = [*held_by, str(MINIMAL), "--steps", str(steps), "--step-delay", "0.02"]
        self.place, self.output, self.errors = place, place / "output", place / "errors"
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            command = [str(BIN / "mt-resilient"), "run", *fixed, "--", "torchrun", "--nproc-per-node", "1", *train]
            self.process = subprocess.Popen(command, cwd=place, env=environment(), stdout=output, stderr=errors)

    def until(self, is_so: Callable[[], bool]) -> None:
        ends = time.monotonic() + 300
        while not is_so():
            assert time.monotonic() < ends, self.errors.read_text()
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        self.until(lambda: f": step {step} " in self.output.read_text())

    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r": step (\d+) ", self.output.read_text())]

    def agents(self, node: str) -> list[psutil.Process]:
        """Of other processes on this machine some are ending at this moment: theirs is None."""
        place = str(self.place / "run" / "nodes" / node)
        return [each for each in psutil.process_iter(["cmdline"]) if place in (each.info["cmdline"] or ())]


def test_a_job_on_two_hosts_ends_as_one_and_its_terminal_knows_it(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 200, held=True)
    job.until_step(10)
    status = json.loads(cli("status", "--json", "--run-dir", str(tmp_path / "run")).stdout)
    worlds: list[World] = []
    job.until(lambda: worlds.extend(filter(None, [explain.look(RunDirectory(tmp_path / "run"))])) or worlds != [])
    (world,) = worlds
    assert {name: node.labels for name, node in world.nodes.items()} == {"a": {}, "b": {"rack": "r1"}}
    etcd = next(each for each in psutil.Process(job.process.pid).children() if "etcd" in each.name())
    etcd.kill()
    job.until(lambda: "etcd had died and was started again" in job.errors.read_text())
    (tmp_path / "gate").touch()
    assert job.process.wait(300) == 0, job.errors.read_text()
    printed = job.output.read_text()
    assert all(line.startswith(("a: ", "b: ")) for line in printed.splitlines()), printed
    assert digest_of(printed)
    assert len(step_lines(printed.replace("a: ", "").replace("b: ", ""))) == 200
    said = job.errors.read_text()
    assert "the agent on a has exited with code 0" in said
    assert set(status["nodes"]) == {"a", "b"}
    assert (status["roles"], status["leader"] in ("a", "b")) == ({"a": "trains", "b": "trains"}, True)
    again = Real(tmp_path, sshd, 200, held=True)
    assert again.process.wait(180) == 2
    assert "is finished; name another directory with --run-dir" in again.errors.read_text()


@pytest.mark.variant
def test_one_ctrl_c_ends_a_job_on_two_hosts(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 100000)
    job.until_step(10)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(90) == 130, job.errors.read_text()
    said = job.errors.read_text()
    assert said.count("has exited with code 130") == 2, said
    assert said.count("the job has ended after step") <= 1, said
    last = cli("status", "--run-dir", str(tmp_path / "run")).stdout
    assert "the launch has ended with code 130: the training has not reached its end" in last, last


@pytest.mark.variant
def test_a_launching_terminal_that_is_killed_takes_the_job_with_it(tmp_path: Path, sshd: Sshd) -> None:
    """And its etcd: the agents leave without a last snapshot, having trained on unseen for some time. What is on disk is whole, and the
    next launch goes on from there: what the agents were asked before is not meant for it."""
    job = Real(tmp_path, sshd, 100000, "--durable-every", "10")
    job.until_step(40)
    job.until(lambda: " is on disk (" in job.errors.read_text())
    tree = [psutil.Process(job.process.pid), *job.agents("a"), *job.agents("b")]
    tree += [child for each in tree for child in each.children(recursive=True)]
    job.process.kill()
    job.process.wait()
    ends = time.monotonic() + 180
    while left := living(tree):
        assert time.monotonic() < ends, left
        time.sleep(0.1)
    kept = cli("snapshots", "--run-dir", str(tmp_path / "run"), "verify")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    again = Real(tmp_path, sshd, 100000, "--durable-every", "10")
    try:
        again.until(lambda: len(again.steps()) > 20)
        assert min(again.steps()) > 10
    finally:
        again.process.send_signal(signal.SIGINT)
    assert again.process.wait(90) == 130, again.errors.read_text()


def test_what_ssh_does_not_take_is_told_in_its_own_words(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 1, "--ssh-option", "Nonsense=1")
    assert job.process.wait(180) == 2
    said = job.errors.read_text()
    assert re.search(r"refuses its options for a \(.*Bad configuration option: nonsense\); nothing was", said), said


def test_a_hostfile_for_fewer_than_are_wanted(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 1, "--nodes", "3")
    assert job.process.wait(180) == 2
    assert "--nodes 3: the hostfile has 2 hosts; nothing was started" in job.errors.read_text()


def test_a_job_for_which_too_few_hosts_can_be_reached(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 10, b="port=1")
    assert job.process.wait(300) == 3, job.errors.read_text()
    said = job.errors.read_text()
    assert "b cannot be used (ssh: connect to host 127.0.0.1 port 1: Connection refused)" in said
    assert "the job needs 2 of the 2 hosts, but b cannot be used; the other agents were told to exit" in said


@pytest.mark.variant
def test_a_job_that_starts_without_its_spare(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 10, "--spares", "1", "--set", "nodes.join_s=1", b="port=1")
    assert job.process.wait(300) == 0, job.errors.read_text()
    assert "the job runs without it" in job.errors.read_text()
    assert digest_of(job.output.read_text())


def test_an_agent_that_fails_before_the_job_has_begun_is_not_waited_for(tmp_path: Path, sshd: Sshd) -> None:
    (tmp_path / "run" / "nodes").mkdir(parents=True)
    (tmp_path / "run" / "nodes" / "b").write_text("no directory")
    job = Real(tmp_path, sshd, 10)
    assert job.process.wait(300) == 3, job.errors.read_text()
    said = job.errors.read_text()
    assert (
        "the job needs 2 of the 2 hosts, but the agent on b has exited with code 3; the other agents were told to exit"
        in said
    )


@pytest.mark.variant
def test_a_run_directory_of_any_name_and_a_place_for_snapshots_as_it_is_given(tmp_path: Path, sshd: Sshd) -> None:
    job = Real(tmp_path, sshd, 10, "--run-dir", "lr=3e-4 größe+1", "--snapshots", "kept")
    assert job.process.wait(300) == 0, job.errors.read_text()
    assert RunDirectory(tmp_path / "lr=3e-4 größe+1").kept().address == str(tmp_path / "kept")
    begun = next(Journal(tmp_path / "lr=3e-4 größe+1" / "journal.jsonl").read())
    assert begun["snapshots"] == str(tmp_path / "kept")
