"""The last sentence of an agent: how the job has ended, and what the same command will do."""

from __future__ import annotations

from ..resilience.orders import GenerationRecord
from .run_directory import RunDirectory
from .telling import Telling


def say_the_end(
    code: int, record: GenerationRecord | None, lost: str, newest: int | None, run: RunDirectory, telling: Telling
) -> None:
    """lost: why the state that the training ended with is not on disk; newest: step of the newest one that is."""
    again = "begins anew" if newest is None else f"goes on from step {newest}"
    if lost and code > 128:
        telling.say(f"ended as asked, but without the last snapshot ({lost}); the same command {again}", "bad")
    elif lost and newest is None and record and record.complete:
        run.finished.touch()  # whoever gives the command again does not mean to train all of it again
        telling.say(
            f"the training is over, but no state of it is on disk ({lost}): what the script has saved is all there is",
            "bad",
        )
    elif lost:
        telling.say(
            f"the ranks are through, but their last state is not on disk ({lost}). Mend that, and give the same command once more: "
            f"it {again}",
            "bad",
        )
    elif code == 0 and record and record.complete:
        run.finished.touch()
        telling.say(record.reason, "good")
    elif code == 0 and record:
        telling.say(f"{record.reason}; the same command {again}", "good")
    elif code > 128:
        telling.say(f"ended as asked; the same command goes on from the newest snapshot in {run.root}", "warn")
    else:
        why = record.reason if record else "unknown"
        telling.say(f"stopped: {why}. Everything is kept; see: mt-resilient explain --run-dir {run.root}", "bad")
