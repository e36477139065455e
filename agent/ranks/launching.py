"""Starts the launcher of one generation: forked from the warm process where that is ready, else as torchrun starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...resilience.errors import MachineError
from ...resilience.ipc import die_with_parent
from ..launch.torchrun import Launch
from .warm_client import WarmProcess
from .worker_group import WorkerGroup, watched


def started(
    launch: Launch,
    warm: WarmProcess,
    generation: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    end_others: Callable[[], None],
) -> WorkerGroup:
    """The worker group whose launcher was started. end_others: end every process that nobody has to watch. Raises OSError."""
    why = warm.why
    if warm.ready:
        try:
            pid, how = warm.launch(launch.program, arguments, environment, launch.ranks)
            return WorkerGroup(generation, watched(pid), how)
        except MachineError as error:
            why = str(error)
            end_others()  # it may have forked all the same, and answered too late
    try:
        process = die_with_parent.spawn([*launch.program, *arguments], env=environment, start_new_session=True)
        process.returncode = 0  # the worker group reaps it: without this, Popen would look for it again
        return WorkerGroup(generation, watched(process.pid), f"cold: {why}")
    except OSError:
        end_others()  # nobody watches it: the next round starts another one
        raise
