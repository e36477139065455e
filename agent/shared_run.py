"""The run directory that the nodes of several launches share: `torchrun --nnodes 4 --master-addr …` (`join/static_nodes.py`).

Under a scheduler, each submission has another name. So a node that had no part in the earlier submissions cannot tell from its own name
that the snapshots there are its job's. It compares the arguments, and checks that no agent of an earlier submission still runs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from ..checkpoint.backend.filesystem import read_file
from ..resilience.errors import MachineError, UsageError
from ..resilience.ipc.file_descriptors import high
from .join.config_match import command_difference
from .run_directory import RunDirectory

_NAME = "launch"
_NAME_BYTES = 1024


def last_run(whole: Path) -> RunDirectory | None:
    """Return the folder of the node that wrote into its journal last; None: no node did."""
    journals = [*whole.glob("nodes/*/journal.jsonl")]
    return RunDirectory(max(journals, key=lambda path: path.stat().st_mtime).parent) if journals else None


def heir(whole: Path, run: RunDirectory, launch: str, arguments: Sequence[str] | None, closing: ExitStack) -> bool:
    """Return whether this node, if it is new in `whole`, continues the job there: no agent of another launch runs there. Raises UsageError
    if the last launch there had other arguments, and MachineError if the folder cannot be written. Until `closing`, other nodes see that
    this agent runs. run: this node's locked folder. launch: the name of its launch. arguments: `Spec.command`; None: they may differ."""
    try:
        record = high(os.open(run.root / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        closing.callback(os.close, record)
        os.truncate(record, 0)
        os.write(record, launch.encode())  # before the lock: `_runs` reads the name once it has met the lock
        fcntl.flock(record, fcntl.LOCK_EX)  # waits only while another node looks
    except OSError as error:
        raise MachineError(f"{run.root / _NAME} cannot be written ({error.strerror}); nothing was started") from error
    last = None if run.owner else last_run(whole)
    known = last.arguments if last else None
    if known is not None and arguments is not None and known != list(arguments):
        raise UsageError(
            f"the run directory {whole} belongs to another command: {command_difference(arguments, known)}; nothing was started. To "
            "continue the job with this command, add --changed-arguments. To train anew, name another directory with --run-dir"
        )
    return not in_use(whole, launch)


def in_use(whole: Path, launch: str = "") -> bool:
    """Return whether an agent of several nodes runs in `whole`, on any host, or may run there. launch: except those of this launch."""
    return any(_runs(record, launch) for record in whole.glob(f"nodes/*/{_NAME}"))


def _runs(record: Path, launch: str) -> bool:
    """Return whether an agent of another launch runs in the folder of `record`, or may run there."""
    try:
        with record.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return read_file(record, _NAME_BYTES).decode() != launch
    return False
