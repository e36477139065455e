"""An agent's final message, and whether it marks the job as finished."""

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

OVER = {"complete": True, "replay_until": Step(40), "reason": "the training is over"}
DRAINED = {"reason": "node b is drained by alice"}
LOST = "step 58: none was taken"


@pytest.mark.parametrize(
    ("code", "last", "lost", "newest", "through", "said", "finished"),
    [
        (0, OVER, "", 20, True, "the training is over", True),
        (0, OVER, "", 40, False, "the training is over", True),
        (0, OVER, "", None, False, "the training is over", True),  # the script keeps its own state
        # The last state of the other nodes may be lost. Then the same command continues the job, on this node too.
        (0, OVER, "", 20, False, "the training is over", False),
        (
            3, {**DRAINED, "last_snapshot": True}, LOST, 50, False,
            f"ended, node b is drained by alice, but without the last snapshot ({LOST}); the same command continues from step 50", False,
        ),
        (
            3, DRAINED, LOST, 50, False,
            f"the ranks have finished, but their last state is not on disk ({LOST}). Fix that, and give the same command again: "
            "it continues from step 50", False,
        ),
        (
            0, OVER, LOST, 50, True,
            f"the training is over. No snapshot contains the last state ({LOST}): only the script's own checkpoints do", True,
        ),
        (
            0, {**OVER, "complete": False}, LOST, 50, False,
            f"the training is over. No snapshot contains the last state ({LOST}): only the script's own checkpoints do; "
            "the same command continues from step 50", False,
        ),
        (130, {"reason": "x"}, "", None, True, "ended, x, after its ranks had finished; the same command begins anew", False),
        (130, {"reason": "x"}, "", None, False, "ended, x; the same command begins anew", False),
    ],
)  # fmt: skip
def test_the_final_message_and_whether_the_job_is_marked_finished(
    code: int,
    last: dict[str, Any],
    lost: str,
    newest: int | None,
    through: bool,
    said: str,
    finished: bool,
    tmp_path: Path,
) -> None:
    heard: list[str] = []
    telling: Any = SimpleNamespace(say=lambda words, mood="info": heard.append(words))
    run = RunDirectory(tmp_path)
    say_the_end(code, record(Phase.ENDED, **last), lost, newest, run, telling, drained=False, through=through)
    assert (heard, run.finished.exists()) == ([said], finished)


def test_an_agent_that_hangs_at_its_exit_ends_with_its_code_and_logs_the_stacks(tmp_path: Path) -> None:
    script = (
        "import sys, threading; from pathlib import Path; from mt_resilient.agent.join.exit_report import leave_soon; "
        "print('said'); leave_soon(7, Path(sys.argv[1]), 0.2); threading.Event().wait()"
    )
    log = tmp_path / "leaving.log"
    assert subprocess.run([sys.executable, "-c", script, "/nowhere/leaving.log"], timeout=60).returncode == 7
    done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (7, "said\n"), done.stderr
    assert "in wait" in log.read_text()
