"""`status --watch` in a real terminal (tmux), and `status --json` against its published schema, while a job loses a rank."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from mt_resilient.resilience.report.json_outputs import StatusObject

from ..harness import GATED, MINIMAL, ROOT, Job, cli


def same_shape(given: object, known: object, where: str = "") -> None:
    """Every object of `given` has the keys of `known`, which was made from it by its type: nothing is there that the type does not name."""
    if isinstance(given, dict) and isinstance(known, dict):
        assert given.keys() == known.keys(), where
        for name, value in given.items():
            same_shape(value, known[name], f"{where}.{name}")
    elif isinstance(given, list) and isinstance(known, list):
        for one, other in zip(given, known, strict=True):
            same_shape(one, other, where)


class Tmux:
    """A terminal of 100 by 30 in which a shell runs."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-f", "/dev/null", "-S", str(socket)]
        self.do("new-session", "-d", "-x", "100", "-y", "30", "env", "PS1=$ ", "sh")

    def do(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True, timeout=60).stdout

    def until(self, shown: Callable[[str], bool], seconds: float = 180) -> str:
        until = time.monotonic() + seconds
        while not shown(screen := self.do("capture-pane", "-p")):
            assert time.monotonic() < until, screen
            time.sleep(0.2)
        return screen


@contextmanager
def terminal(place: Path) -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (Debian)")
    tmux = Tmux(place / "tmux")
    try:
        yield tmux
    finally:
        tmux.do("kill-server")


def test_a_person_watches_a_job_lose_a_rank(tmp_path: Path) -> None:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Job(tmp_path, command)
    try:
        job.until_step(5)
        told = json.loads(cli("status", "--json", "--run-dir", str(job.directory)).stdout)
        same_shape(told, msgspec.to_builtins(msgspec.convert(told, StatusObject)))
        assert (told["running"], told["total"], told["directory"]) == (True, 60, str(job.directory))
        schema = json.loads((ROOT / "docs/schemas/status.json").read_text())
        assert told.keys() == schema["$defs"]["StatusObject"]["properties"].keys()

        with terminal(tmp_path) as tmux:
            watching = f"{sys.executable} -m mt_resilient status --watch --run-dir {job.directory}"
            tmux.do("send-keys", f"cd {ROOT.parent}; {watching}; echo code $?", "Enter")
            screen = tmux.until(lambda shown: "■■" in shown and "step 30 of 60" in shown)
            assert "Training: " in screen
            assert "newest snapshots: memory step " in screen
            assert tmux.do("display-message", "-p", "#{alternate_on}").strip() == "1"
            job.kill_rank(1)
            tmux.until(lambda shown: "rank 1 on" in shown and "was killed by signal 9; recovered" in shown)
            tmux.do("send-keys", "C-c")
            screen = tmux.until(lambda shown: "code 0" in shown)
            assert "Traceback" not in screen
            assert tmux.do("display-message", "-p", "#{alternate_on}").strip() == "0"
        assert job.finish() == 0
    finally:
        if job.agent.poll() is None:
            job.kill_everything()
    ended = cli("status", "--watch", "--run-dir", str(job.directory))
    assert ended.returncode == 0, "the watch of a job that is over is over"
    *incidents, state = ended.stdout.splitlines()
    assert any(": rank 1 on" in each and "was killed by signal 9" in each for each in incidents), incidents
    assert all(each[:19] <= state[:19] for each in incidents), "each line begins with its own time"
    assert " Finished after step 60 of 60. Nothing to do. step 60 of 60, " in state
