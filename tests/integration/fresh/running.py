"""Start a script under plain torchrun, or under ours, cold or warm; kill a rank of it; read what its ranks have written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from mt_resilient.agent.launch.ports import free_port

from ...harness import BIN, environment

SCRIPTS = Path(__file__).parent
PLAIN, COLD, WARM = "torchrun", "cold", "warm"
_BUDGETS = ("recovery.same_failure_at_start=99", "recovery.max_without_progress=99", "recovery.failed_starts=99")
DEADLINE_S = 300.0


def an_odd_parent() -> None:
    """Settings that a rank inherits, none of them the usual one: none may get lost or come from somebody else."""
    os.umask(0o027)
    os.nice(1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for number in (signal.SIGHUP, signal.SIGTSTP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
    Path("/proc/self/oom_score_adj").write_text("17")


class Run:
    """One launch in a folder of its own, `here`, which ranks know as their working directory."""

    def __init__(self, place: Path, how: str, **extra: str) -> None:
        """extra: environment."""
        self.how, self.here = how, place / how
        self.out = self.here / "out"
        self.out.mkdir(parents=True)
        shutil.copytree(SCRIPTS, self.here / "fresh")
        for script in ("script.py", "ending.py", "littered.py"):
            shutil.copy(SCRIPTS / script, self.here)
        (self.here / "stdin").write_text("a line\n")
        known = {name: value for name, value in environment().items() if not name.startswith("PYTHON") and name != "_"}
        self.environment = {**known, "PROBED": "1", "PLACE": str(self.out), **extra}

    def start(self, *words: str, ranks: int = 1, lives: int = 1, prepare: Callable[[], None] | None = None) -> Run:
        """words: torchrun's options, script and arguments; lives: how often the ranks may fail and be started again."""
        command = [str(BIN / "torchrun"), "--nproc-per-node", str(ranks)]
        if self.how == PLAIN:
            port = free_port(
                "127.0.0.1", wished=11_000
            )  # below those that the agents beside it draw, until it is bound
            command += ["--master-port", str(port), "--max-restarts", str(lives - 1)]
        else:
            settings = [word for setting in _BUDGETS for word in ("--set", setting)] if lives > 1 else []
            ours = [
                str(BIN / "mt-resilient"),
                "run",
                "--run-dir",
                "run",
                "--metrics-port",
                "0",
                "--snapshot-every",
                "1",
            ]
            command = [*ours, *(["--no-warm"] if self.how == COLD else []), *settings, "--", *command]
        with (
            (self.here / "stdin").open() as stdin,
            self._file("stdout").open("w") as out,
            self._file("stderr").open("w") as err,
        ):
            self.process = subprocess.Popen(
                [*command, *words],
                cwd=self.here,
                env=self.environment,
                stdin=stdin,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,
            )
        return self

    def kill_once_warm(self) -> Run:
        """Kill the rank that has written its process id into `ready`, once the next start will be forked."""
        end = time.monotonic() + DEADLINE_S
        while not ((self.out / "ready").exists() and "the next start will be forked" in self.said):
            if "the next start will be cold" in self.said or self.process.poll() is not None or time.monotonic() > end:
                self._fail("was not prepared")
            time.sleep(0.02)
        os.kill(int((self.out / "ready").read_text()), signal.SIGKILL)
        return self

    def end(self) -> Run:
        """Wait for its end. One that does not come is ended by force, and fails."""
        try:
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._fail("did not end")
        return self

    def _fail(self, what: str) -> NoReturn:
        with suppress(psutil.NoSuchProcess):
            job = psutil.Process(self.process.pid)
            for process in (*job.children(recursive=True), job):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()
        raise AssertionError(f"{self.how} {what}:\n{self.said[-3000:]}")

    def _file(self, name: str) -> Path:
        return self.here / name

    @property
    def launches(self) -> list[str]:
        """How each life behind the first one was started."""
        started = re.findall(
            r"^mt-resilient (?:[\d-]+ )?\S+ generation (\d+): .* starts? from [^,\n]*(?:, (\w+))?", self.said, re.M
        )
        return [how for number, how in started if number != "1"]

    @property
    def said(self) -> str:
        return self._file("stderr").read_text(errors="replace")

    @property
    def printed(self) -> str:
        return self._file("stdout").read_text(errors="replace")

    def read(self, name: str) -> str:
        """What the ranks have written into a file, with the folder and the addresses of objects left out."""
        return self.same(self.out.joinpath(name).read_text(errors="surrogateescape"))

    def same(self, text: str) -> str:
        return re.sub("0x[0-9a-f]+", "0x", text.replace(str(self.here), "<here>"))

    def report(self, name: str) -> dict[str, object]:
        assert (self.out / name).exists(), f"{self.how} has no {name}:\n{self.said[-4000:]}"
        found: dict[str, object] = json.loads(self.read(name))
        return found
