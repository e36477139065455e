"""What an agent says at last, and whether it calls the training finished."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.ending import say_the_end
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.machine import Phase
from mt_resilient.resilience.terms import Step

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
