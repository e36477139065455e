"""Chooses the run directory of a launch that names none, and locks it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from ..resilience.clock import monotonic_s, sleep, wall_s
from .join.registration import described
from .launch.torchrun import Launch
from .run_directory import InUse, RunDirectory
from .shared_run import in_use, last_run

_AT_ONCE_S = 60.0
"""Torchruns that begin within this many seconds of each other were started by one script, to run at the same time."""


def default_directory(
    launch: Launch,
    below: str = "",
    base: str = "mt-runs/",
    busy: Collection[Path] = (),
    task: str = "",
    invocation: str = "",
    *,
    once: bool = False,
) -> Path:
    """Return the run directory for `launch`. The directory's name is `base`, or `<base><script>` if `base` ends with a slash.
    `next_directory` says when it appends `.2`, `.3` … task: this agent's number among agents that srun has started with the same command,
    each for a training of its own. The other arguments are those of `next_directory`."""
    path = Path(base) / (launch.name if base.endswith("/") else "")
    path = path.with_name(f"{path.name}-task{task}") if task else path
    return next_directory(path, described(launch, ()).command, below, busy, invocation, once=once)


def next_directory(
    base: Path,
    arguments: Sequence[str],
    below: str = "",
    busy: Collection[Path] = (),
    invocation: str = "",
    *,
    once: bool = False,
) -> Path:
    """Return the first of `base`, `base.2`, `base.3` … with an unfinished run of these arguments (`Spec.command`). If there is no such run,
    return the first of these paths that does not exist. But if no run ever had these arguments, and an unfinished run with other arguments
    has a snapshot, return that run's directory: the agent then reports the difference. below: this node's folder in it. busy: directories
    that other agents have locked. invocation: names the start of the script that has started this torchrun; a run of the same start is no
    reason to report a difference, because the script itself began this torchrun behind it. once: return a locked directory too if its run
    has these arguments, or is one of several nodes. The user may have given the same command twice."""
    again, other, ordinal, path = False, None, 1, base
    while run := _run_in(path, below):
        unfinished = not run.finished.exists()
        known = run.arguments if unfinished or not again else ()  # reading a long journal takes time
        same = known in (None, list(arguments))
        free = path not in busy or (once and bool(known is not None or below))
        if same and free and unfinished:
            return path
        again = again or same
        earlier = not invocation or run.start().get("invocation") != invocation
        left = not same and unfinished and earlier and path not in busy and not (run.agent() or in_use(path))
        if left and run.has_snapshot:
            other = path
        ordinal += 1
        path = base.with_name(f"{base.name}.{ordinal}")
    return other if other and not again else path


def _run_in(path: Path, below: str) -> RunDirectory | None:
    """Return this node's run in the run directory `path`. A node that has no run there yet continues the run of the other nodes (`below`).
    None: there is no run."""
    own = RunDirectory(path / below)
    others = last_run(path) if below and not own.journal.exists() else None
    return others or (own if own.root.exists() else None)


def take_one(
    choose: Callable[[Collection[Path]], Path], below: str, say: Callable[[str], None], wait_s: float = 30.0
) -> tuple[Path, RunDirectory]:
    """Lock a run directory. If another agent has locked it, choose again. choose: returns a directory; its argument lists the directories
    that other agents have locked. wait_s: how long to wait for another agent to exit if this one would continue its job. Raises as
    `RunDirectory.take` does."""
    busy: list[Path] = []
    since_s = monotonic_s()
    told = False
    while True:
        whole = choose(busy)
        run = RunDirectory(whole / below)
        try:
            run.take()
            return whole, run
        except InUse as error:
            if choose([*busy, whole]) == whole:  # the user named this directory
                raise
            began_s = run.start().get("at_s", 0.0)
            beside = wall_s() - began_s < _AT_ONCE_S and not run.ends
            if beside or monotonic_s() - since_s > wait_s:
                busy.append(whole)
                continue
            if began_s and not told:  # perhaps a script has ended a job, and starts it again
                say(f"{error}. Waiting {wait_s:.0f} s for it to exit; after that, this run begins in another directory")
                told = True
            sleep(0.2)  # without `began_s`, the other agent will soon say what it runs
