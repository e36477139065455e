"""What an agent says at last, and whether it calls the training finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.join.exit_report import say_the_end
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Step

from .worlds import record


@pytest.mark.parametrize(
    ("through", "newest", "finished"),
    [(True, 20, True), (False, 40, True), (False, None, True), (False, 20, False)],
)
def test_who_stood_by_calls_finished_only_what_is_on_disk(
    through: bool, newest: int | None, finished: bool, tmp_path: Path
) -> None:
    """The last state of the others may be lost: then the same command goes on, on this node too. Where nothing is on disk, the script keeps
    its state itself."""
    over = record(Phase.ENDED, complete=True, replay_until=Step(40), reason="the training is over")
    said: list[str] = []
    telling: Any = SimpleNamespace(say=lambda words, mood="info": said.append(words))
    run = RunDirectory(tmp_path)
    say_the_end(0, over, "", newest, run, telling, drained=False, through=through)
    assert (run.finished.exists(), said) == (finished, ["the training is over"])


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            True,
            "ended, node b is drained by alice, but without the last snapshot (step 58: none was taken); the same command goes on from",
        ),
        (
            False,
            "the ranks are through, but their last state is not on disk (step 58: none was taken). Mend that, and give the same command",
        ),
    ],
)
def test_a_last_state_that_is_not_on_disk(asked: bool, said: str, tmp_path: Path) -> None:
    heard: list[str] = []
    telling: Any = SimpleNamespace(say=lambda words, mood: heard.append(words))
    over = record(Phase.ENDED, last_snapshot=asked, reason="node b is drained by alice")
    lost = "step 58: none was taken"
    say_the_end(3, over, lost, 50, RunDirectory(tmp_path), telling, drained=False, through=False)
    assert heard[0].startswith(said)


@pytest.mark.parametrize(
    ("complete", "said"),
    [
        (
            True,
            "the training is over. No snapshot has its last state (step 58: x): only the script's own checkpoints do",
        ),
        (
            False,
            "the training is over. No snapshot has its last state (step 58: x): only the script's own checkpoints do; "
            "the same command goes on from step 50",
        ),
    ],
)
def test_a_last_state_that_no_snapshot_can_hold_is_no_failure_of_a_training(
    complete: bool, said: str, tmp_path: Path
) -> None:
    heard: list[str] = []
    telling: Any = SimpleNamespace(say=lambda words, mood: heard.append(words))
    over = record(Phase.ENDING, complete=complete, reason="the training is over")
    run = RunDirectory(tmp_path)
    say_the_end(0, over, "step 58: x", 50, run, telling, drained=False, through=complete)
    assert (heard, run.finished.exists()) == ([said], complete)


def test_an_agent_that_hangs_as_it_leaves_ends_with_its_code_and_says_where(tmp_path: Path) -> None:
    script = (
        "import sys, threading; from pathlib import Path; from mt_resilient.agent.join.exit_report import leave_soon; "
        "print('said'); leave_soon(7, Path(sys.argv[1]), 0.2); threading.Event().wait()"
    )
    log = tmp_path / "leaving.log"
    assert subprocess.run([sys.executable, "-c", script, "/nowhere/leaving.log"], timeout=60).returncode == 7
    done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr
    assert "in wait" in log.read_text()


@pytest.mark.parametrize(("through", "when"), [(True, ", when its ranks were through"), (False, "")])
def test_an_end_by_a_signal_says_whether_the_training_was_through(through: bool, when: str, tmp_path: Path) -> None:
    heard: list[str] = []
    telling: Any = SimpleNamespace(say=lambda words, mood: heard.append(words))
    over = record(Phase.ENDED, reason="because etcd is away")
    say_the_end(130, over, "", None, RunDirectory(tmp_path), telling, drained=False, through=through)
    assert heard == [f"ended, because etcd is away{when}; the same command begins anew"]
