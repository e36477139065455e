"""What the program does that waits for the agent's death: no process of the ranks stays, and none holds the agent's output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mt_resilient.agent.ranks import after_death
from mt_resilient.agent.ranks.after_death import TIDY_S

WRITER, TRACKER = "python -c spawn_main", "python -c from multiprocessing.resource_tracker import main"
LATE = int(TIDY_S / 0.05) + 2
"""Looks until clean-up processes have had their time."""


@pytest.mark.parametrize(
    ("told", "looks", "killed"),
    [
        ("token\n", [[(7, WRITER)]], {7: 1}),
        ("token\n", [[], [(7, WRITER)]], {7: 1}),  # it was just starting a program
        ("token\n", [[(7, WRITER)], *[[]] * 9, [(8, WRITER)]], {7: 1, 8: 1}),  # others start meanwhile
        ("token\n", [[(7, WRITER)], *[[]] * 10, [(8, WRITER)]], {7: 1}),
        ("token\n", [[(7, WRITER), (8, TRACKER)], [(8, TRACKER)]], {7: 1}),
        ("token\n", [[(8, TRACKER)]] * LATE, {8: 1}),
        ("token\nin order\n", [[(7, WRITER)]], {}),
        ("", [[(7, WRITER)]], {}),
    ],
)
def test_who_is_killed(
    told: str, looks: list[list[tuple[int, str]]], killed: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(looks)
    counts: dict[int, int] = {}
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(told.encode())))
    monkeypatch.setattr(after_death, "_with", lambda token: next(seen, []))
    monkeypatch.setattr(after_death.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "kill", lambda pid, number: counts.update({pid: counts.get(pid, 0) + 1}))
    after_death.main()
    assert counts == killed


AGENT = """
import multiprocessing, os, time
from mt_resilient.agent.ranks.after_death import AfterDeath

def write(requests):
    print("begun", flush=True)
    requests.get()

if __name__ == "__main__":
    AfterDeath("the-agent-of-this-test")
    os.environ["TOKEN"] = "the-agent-of-this-test"
    spawn = multiprocessing.get_context("spawn")
    requests = spawn.JoinableQueue()
    spawn.Process(target=write, args=(requests,), daemon=True).start()
    time.sleep(600)
"""


def test_a_writer_that_waits_for_its_dead_rank_ends_with_the_agent(tmp_path: Path) -> None:
    """As Megatron's writers of asynchronous saves: each holds the writing end of its own queue, Python's resource tracker waits for all
    of them, and both hold the output of the agent."""
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout
        assert agent.stdout.readline() == "begun\n"
        below = psutil.Process(agent.pid).children(recursive=True)
        assert len(below) == 3, "the program, the writer and its resource tracker"
        agent.kill()
        _, alive = psutil.wait_procs(below, timeout=30)
        for process in alive:
            process.kill()
        assert not alive
        assert agent.stdout.read() == ""
