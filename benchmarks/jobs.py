"""Jobs and processes for the benchmarks: training jobs with the time of each line that they print, forked processes, a rank's handoff.

The same script runs behind `mt-resilient run` and under plain torchrun. The thread that reads the output measures both with the same clock.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil

from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.ipc.die_with_parent import adopt_orphans
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.resilience.model.types import Generation, Step

REPOSITORY = Path(__file__).resolve().parents[1]
GPT = REPOSITORY / "examples" / "gpt" / "pretrain.py"
BESIDE = Path(sys.executable).parent
"""The folder with this environment's torchrun and mt-resilient."""
NEVER = ("--snapshot-every", "1000000000", "--durable-every", "1000000000")
"""Options for a job that takes no snapshot."""

DEVICE_LOOP = str(REPOSITORY / "benchmarks" / "device_loop.py")
SIZES = {"cpu": ("4", "256", "64"), "cuda": ("8", "8192", "16384"), "musa": ("8", "8192", "16384")}
"""Layers, width and batch of `device_loop.py`. On a device: 6.45 GB of state a rank."""
STAMPS = "MT_BENCHMARK_STAMPS"
"""Names the file to which the ranks of `device_loop.py` append the times of their start."""

_STEP = re.compile(r"step (\d+) ")
T = TypeVar("T")


class JobFailed(RuntimeError):
    """A job ended, or did not reach a condition in time."""


@dataclass(frozen=True)
class Stepped:
    at_s: float
    """time.monotonic() when the line arrived."""
    step: int


class Job:
    """One running command. Its stderr is written to `directory/log`."""

    def __init__(
        self, command: Sequence[str], directory: Path, extra: dict[str, str], run_directory: Path | None
    ) -> None:
        """directory: for all files of the job. run_directory: the run directory of `mt-resilient run`; None under plain torchrun."""
        directory.mkdir()
        self.began_s = time.monotonic()
        self.log = directory / "log"
        self.run_directory = run_directory
        self.lines: list[str] = []
        self.steps: list[Stepped] = []
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("MT_RESILIENT_", "PET_"))
        }
        environment |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(directory), **extra}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command], cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                text=True, start_new_session=True,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            at_s = time.monotonic()
            self.lines.append(line)
            if found := _STEP.match(line):
                self.steps.append(Stepped(at_s, int(found[1])))

    def wait_for(self, condition: Callable[[], T | None], within_s: float, what: str) -> T:
        """Return the condition's first true value. Raises JobFailed, with the end of the log, if the job ends or the time is up."""
        deadline = time.monotonic() + within_s
        while not (answer := condition()):
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                how = f"ended with code {self.process.returncode}" if ended else f"took more than {within_s:.0f} s"
                raise JobFailed(f"{what}: the job {how}\n{self.log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.01)
        return answer

    def wait_for_steps(self, count: int, within_s: float = 180.0) -> None:
        """Wait until `count` step lines have arrived."""
        self.wait_for(lambda: len(self.steps) >= count, within_s, f"{count} steps")

    def wait_for_figures(self, word: str, within_s: float) -> Any:
        """Wait for the line that begins with `word`. Return the JSON after it."""

        def found() -> str | None:
            return next((line for line in self.lines if line.startswith(f"{word} ")), None)

        return json.loads(self.wait_for(found, within_s, f"the line {word!r}").removeprefix(word))

    def journal(self) -> list[dict]:
        """Return the journal that `mt-resilient run` writes."""
        assert self.run_directory
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.run_directory / "journal.jsonl").read_text().splitlines()]
        return []

    def warm_ready(self) -> bool:
        return any("the warm process is ready" in line.get("sentence", "") for line in self.journal())

    def stamps(self) -> list[dict[str, float]]:
        """Return what the ranks of `device_loop.py` have said of their starts."""
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in (self.log.parent / "stamps").read_text().splitlines()]
        return []

    def rank_pids(self) -> list[int]:
        """Return the ranks' pids, by local rank. The list is empty until all are known."""
        if self.run_directory is None:
            return _plain_rank_pids(self.process.pid)
        said = subprocess.run(
            [BESIDE / "mt-resilient", "status", "--json", "--run-dir", self.run_directory],
            capture_output=True,
            text=True,
        )
        pids = [pid for node in json.loads(said.stdout).get("nodes", {}).values() for pid in node["pids"]]
        return pids if all(pids) else []

    def tree(self) -> list[psutil.Process]:
        """Return the job's first process and all its descendants."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        return []

    def stop(self) -> None:
        """Terminate the job, then kill its remaining processes."""
        left = self.tree()
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def _plain_rank_pids(torchrun: int) -> list[int]:
    ranks: dict[int, int] = {}
    for child in psutil.Process(torchrun).children():
        with suppress(psutil.Error):
            environment = child.environ()
            if "LOCAL_RANK" in environment:
                ranks[int(environment["LOCAL_RANK"])] = child.pid
    return [ranks[rank] for rank in sorted(ranks)]


def plain(script: Sequence[str], directory: Path) -> Job:
    """Start two ranks of `script` under torchrun.

    Without TORCH_DISABLE_SHARE_RDZV_TCP_STORE, restarted ranks read the former ranks' addresses from the shared store, and 4 of 10 restarts
    fail.
    """
    command = [str(BESIDE / "torchrun"), "--standalone", "--max-restarts", "3", "--nproc-per-node", "2", *script]
    return Job(command, directory, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", STAMPS: str(directory / "stamps")}, None)


def wrapped(script: Sequence[str], directory: Path, *options: str, ranks: int = 2) -> Job:
    """Start `ranks` ranks of `script` under `mt-resilient run`, with `options` of that command."""
    ours = [str(BESIDE / "mt-resilient"), "run", "--run-dir", str(directory / "run"), "--metrics-port", "0", *options]
    theirs = [str(BESIDE / "torchrun"), "--standalone", "--nproc-per-node", str(ranks), *script]
    return Job([*ours, "--", *theirs], directory, {STAMPS: str(directory / "stamps")}, directory / "run")


@contextmanager
def workplace(parent: Path | None = None) -> Iterator[Path]:
    """Yield a temporary directory, in `parent` if given. When the context ends, all processes started here are killed, and the directory is
    deleted."""
    adopt_orphans()  # orphans become children of this process
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with TemporaryDirectory(prefix="mt-resilient-benchmark-", dir=parent) as directory:
        try:
            yield Path(directory)
        finally:
            while left := psutil.Process().children(recursive=True):
                for process in left:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                psutil.wait_procs(left, timeout=5)


def handoff(**given: Any) -> Handoff:
    """Return what an agent hands to the ranks of generation 1, which resume nothing. given: the fields that differ."""
    fields: dict[str, Any] = {
        "generation": Generation(1), "board": "", "arena": (), "snapshots": "", "resume_step": Step(-1),
        "replay_until": Step(-1), "every_steps": 1, "durable_every_steps": 1, "reach_steps": 100, "policy": RankPolicy(),
        "turns": (), "windows": (), "modules": "", "origin": "",
    }  # fmt: skip
    return Handoff(**(fields | given))


def forked(count: int, work: Callable[[int], None]) -> Callable[[], None]:
    """Run work(0), work(1) … in `count` forked processes. Return a function that waits for them; it raises JobFailed if one failed."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work(number)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)

    def wait() -> None:
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            raise JobFailed("a forked process failed")

    return wait
