"""Starts the launcher of one generation: forked from the warm process if that process is ready, else as a fresh torchrun."""

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
    """Start the launcher and return its worker group. end_others: ends every process of the worker group that the agent does not watch.
    Raises OSError."""
    why = warm.why
    if warm.ready:
        try:
            pid, how = warm.launch(launch.program, arguments, environment, launch.ranks)
            return WorkerGroup(generation, watched(pid), how)
        except MachineError as error:
            why = str(error)
            end_others()  # the warm process may have forked a launcher, and answered too late
    try:
        process = die_with_parent.spawn([*launch.program, *arguments], env=environment, start_new_session=True)
        process.returncode = 0  # the worker group reaps the process: without this line, Popen would wait for it again
        return WorkerGroup(generation, watched(process.pid), f"cold: {why}")
    except OSError:
        end_others()  # a launcher may run unwatched, and the next round starts another one
        raise
