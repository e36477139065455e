"""Drive `mt-resilient run` from a test: start it, look at it through its own store, hurt it, and read what it left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mt_resilient.agent.cli import explain
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.model.cause import Cause
from mt_resilient.resilience.model.incident import Incident
from mt_resilient.resilience.model.node import NodeStatus
from mt_resilient.resilience.report.journal import Journal

from .once import once

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MINIMAL = ROOT / "examples" / "minimal" / "train.py"
GPT = ROOT / "examples" / "gpt" / "pretrain.py"
FSDP = ROOT / "tests" / "chaos" / "fsdp.py"
FLIPPED = ROOT / "tests" / "chaos" / "flipped.py"
GATED = ROOT / "tests" / "chaos" / "gated.py"
PLAIN = ROOT / "tests" / "chaos" / "plain.py"
HANGING = ROOT / "tests" / "chaos" / "hanging.py"
_DIGEST = re.compile(r"final state sha256 (\w+)")


def environment(**extra: str) -> dict[str, str]:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **extra}


def cli(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`mt-resilient WORDS`, to its end."""
    command = [str(BIN / "mt-resilient"), *words]
    return subprocess.run(command, env=environment(**extra), text=True, capture_output=True, timeout=300)


def exit_codes(rank: Callable[..., None], ranks: int, *arguments: Any) -> list[int]:
    """Of `rank(number, *arguments)` in a fresh interpreter for each rank. Where this process forked them, a lock of another thread of its
    could be held in them for ever."""
    code = f"""
import ast, os, sys, traceback
from {rank.__module__} import {rank.__name__} as rank
code = 0
try:
    rank(*ast.literal_eval(sys.argv[1]))
except Exception:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # with a process group of gloo, the interpreter's teardown may abort
"""
    running = [
        subprocess.Popen([sys.executable, "-c", code, repr((number, *arguments))], cwd=ROOT, env=environment())
        for number in range(ranks)
    ]
    return [process.wait() for process in running]


def some_of(cases: Collection[Any], every: int = 0) -> list[Any]:
    """For `parametrize`: the first case and, of many, each `every`th. scripts/test --all takes the others, too."""
    often = [at == 0 or (every > 0 and at % every == 0) for at, _ in enumerate(cases)]
    return [
        pytest.param(each, marks=() if now else pytest.mark.variant) for now, each in zip(often, cases, strict=True)
    ]


def undisturbed(script: Path, *arguments: str, ranks: int = 2, **extra: str) -> tuple[str, list[str]]:
    """Digest and step lines of a run under plain torchrun, which is done once a session: that two of them are the same to the bit is what
    each test shows that compares one with a disturbed run. extra: environment. A delay of its steps is left out."""
    words = list(arguments)
    if "--step-delay" in words:
        at = words.index("--step-delay")
        del words[at : at + 2]
    return once(_undisturbed, script, words, ranks, extra)


def _undisturbed(script: Path, arguments: list[str], ranks: int, extra: dict[str, str]) -> tuple[str, list[str]]:
    command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), str(script), *arguments]
    done = subprocess.run(command, env=environment(**extra), text=True, capture_output=True, timeout=500)
    # Not its exit code: under plain torchrun, gloo's threads abort the interpreter's teardown in about 1 of 20 runs (torch 2.13).
    assert "final state sha256" in done.stdout, done.stderr[-3000:]
    return digest_of(done.stdout), step_lines(done.stdout)


def digest_of(output: str) -> str:
    found = _DIGEST.findall(output)
    assert found, f"the run did not reach its end:\n{output[-2000:]}"
    return found[-1]


def step_lines(output: str) -> list[str]:
    """One line per step, the last of each that was computed again, in order."""
    lines = {int(line.split()[1]): line for line in output.splitlines() if line.startswith("step ")}
    return [lines[step] for step in sorted(lines)]


def faults(directory: Path) -> list[Incident]:
    """The incidents of a run, without reports that the machine is slow or short of memory: any test may have these on a busy one."""
    found = explain.incidents(RunDirectory(directory)).values()
    return [each for each in found if each.rung or each.cause not in (Cause.STRAGGLER, Cause.MEMORY_SHORT)]


class Job:
    """One run directory, and the agent that runs in it now."""

    forgets = False
    """Its steps are other ones when they are computed again, and the incidents are to say so; else they must not."""
    launcher = "torchrun"
    """The wrapped command's first word."""

    def __init__(self, place: Path, command: Sequence[str], *options: str, **extra: str) -> None:
        """command: the launcher's arguments, script included. A script behind GATED waits at its 30th step until `finish`."""
        self.directory = place / "run"
        self.gate = place / "gate"
        extra = {"GATE": str(self.gate), "GATE_AFTER": "30", **extra}
        self.output, self.errors = place / "output", place / "errors"
        fixed = [
            "--run-dir",
            str(self.directory),
            "--metrics-port",
            "0",
            "--snapshot-every",
            "1",
            "--durable-every",
            "50",
            "--set",
            "hang.floor_s=600",  # the gate may be closed for long, where the machine is slow
        ]
        self.command = [str(BIN / "mt-resilient"), "run", *fixed, *options, "--", self.launcher, *command]
        self.extra = extra
        self.start()

    def start(self) -> None:
        with self.output.open("ab") as output, self.errors.open("ab") as errors:
            self.agent = subprocess.Popen(self.command, env=environment(**self.extra), stdout=output, stderr=errors)

    def look(self) -> NodeStatus | None:
        world = explain.look(RunDirectory(self.directory))
        return next(iter(world.status.values()), None) if world else None

    def until(self, what: Callable[[NodeStatus], bool], deadline_s: float = 300) -> NodeStatus:
        """Wait until the node says so. Fails when the job ends before."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            ended = self.agent.poll() is not None  # asked first: what the agent did just before its end counts
            now = self.look()
            if now and what(now):
                return now
            assert not ended, f"ended with {self.agent.returncode}:\n{self.said()[-3000:]}"
            time.sleep(0.03)
        raise AssertionError(f"not within {deadline_s} s; the last said was {self.look()}\n{self.said()[-3000:]}")

    def until_step(self, step: int) -> NodeStatus:
        return self.until(lambda now: now.min_step >= step and all(now.pids))

    def until_said(self, text: str, deadline_s: float = 300, times: int = 1) -> None:
        end = time.monotonic() + deadline_s
        while True:
            ended = self.agent.poll() is not None  # asked first, as above
            if self.said().count(text) >= times:
                return
            assert not ended, f"ended with {self.agent.returncode}:\n{self.said()[-3000:]}"
            assert time.monotonic() < end, f"never said {text!r}:\n{self.said()[-3000:]}"
            time.sleep(0.03)

    def kill_rank(self, rank: int) -> None:
        now = self.until(lambda now: bool(now.pids) and all(now.pids))
        os.kill(now.pids[rank], signal.SIGKILL)

    def kill_everything(self) -> None:
        """The agent and all that descends from it, at once."""
        everybody = [psutil.Process(self.agent.pid), *psutil.Process(self.agent.pid).children(recursive=True)]
        for process in everybody:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.agent.wait()

    def helper(self, name: str) -> psutil.Process:
        """The agent's own child whose command line holds `name`."""
        return next(found for found, said in self.children() if name in said["cmdline"])

    def warm_process(self) -> psutil.Process:
        """The newest one: while it imports, there is another that forks launchers only."""
        return [found for found, said in self.children() if said["name"] == "mt-warm"][-1]

    def children(self) -> list[tuple[psutil.Process, dict[str, str]]]:
        """The agent's own that live, with their names and command lines."""
        found = []
        for child in psutil.Process(self.agent.pid).children():
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                found.append((child, {"name": child.name(), "cmdline": " ".join(child.cmdline())}))
        return found

    def zombies(self) -> int:
        """How many of them have ended, and are not reaped."""
        ended = 0
        for child in psutil.Process(self.agent.pid).children():
            with suppress(psutil.NoSuchProcess):
                ended += child.status() == psutil.STATUS_ZOMBIE
        return ended

    def finish(self, deadline_s: float = 300) -> int:
        """Open the gate; the exit code."""
        self.gate.touch()
        try:
            code = self.agent.wait(deadline_s)
            hung = RunDirectory(self.directory).leaving
            assert not hung.exists(), hung.read_text()
            assert self.forgets or "with another loss than before" not in self.said(), self.said()[-4000:]
            return code
        except subprocess.TimeoutExpired:
            stacks = self.stacks()
            self.kill_everything()
            raise AssertionError(f"did not end:\n{self.said()[-3000:]}\n{stacks}") from None

    def stacks(self) -> str:
        """Where the agent and everybody below it are."""
        everybody = [psutil.Process(self.agent.pid), *psutil.Process(self.agent.pid).children(recursive=True)]
        dumps = [
            subprocess.run([BIN / "py-spy", "dump", "--native", "--pid", str(p.pid)], capture_output=True, text=True)
            for p in everybody
        ]
        return "\n".join(dump.stdout for dump in dumps)

    def printed(self) -> str:
        return self.output.read_text()

    def said(self) -> str:
        return self.errors.read_text()

    def incidents(self) -> list[Incident]:
        return list(explain.incidents(RunDirectory(self.directory)).values())

    def faults(self) -> list[Incident]:
        return faults(self.directory)

    def events(self, kind: str) -> list[dict[str, object]]:
        return [line for line in Journal(self.directory / "journal.jsonl").read() if line["kind"] == kind]


class ScriptJob(Job):
    """A bash script that starts torchrun, behind `mt-resilient run`."""

    launcher = "bash"
