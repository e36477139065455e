"""What may differ between a rank of plain torchrun and one of ours, each line with its reason; and what does differ beyond that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

MISSING = "(missing)"
_SITE = r".*/training/site"


@dataclass(frozen=True)
class Expected:
    """One difference. where: pattern of the observation's path, its parts joined by dots."""

    where: str
    why: str
    ours: str = ""
    """Only so far as a list of ours has further items, all of which match this."""
    added: bool = False
    """Only where plain torchrun has nothing at all there."""
    warm: bool = False
    """Only of ranks that are forked."""

    def covers(self, path: str, plain: object, ours: object, warm: bool) -> bool:
        if not fnmatchcase(path, self.where) or (self.warm and not warm):
            return False
        if self.added:
            return plain == MISSING
        if self.ours:
            return (
                isinstance(ours, list)
                and isinstance(plain, list)
                and plain == [item for item in ours if item in plain or not re.fullmatch(self.ours, str(item))]
            )
        return True


_OPENBLAS = "OpenBLAS ends its waiting threads at a fork, and starts others when they are asked for"
EXPECTED_DIFFERENCES = (
    Expected("*environ*.MT_RESILIENT_HANDOFF", "names the agent's board, arena and orders to the rank", added=True),
    Expected("*environ*.MT_RESILIENT_DOOR", "where to ask for the board", added=True),
    Expected("*environ*.PYTHONHASHSEED", "one for all lives of a job: a set of words keeps its order", added=True),
    Expected("*environ*.PYTHONPATH", "our sitecustomize.py is found there, and hands over to the user's own"),
    Expected("*environ*.TORCHELASTIC_RESTART_COUNT", "counts restarts, as torchrun's own does", warm=True),
    Expected("*environ*.TORCHELASTIC_RUN_ID", "torchrun makes a name up as well, where it is given no --master-port"),
    Expected("*getenv.PYTHONPATH", "the same, as C sees it"),
    Expected("*environ*.MASTER_PORT", "each start has a port of its own"),
    Expected("*environ*.TORCHELASTIC_ERROR_FILE", "torchrun makes a temporary folder for each start"),
    Expected("paths.path", "the entry of PYTHONPATH", ours=_SITE),
    Expected("paths.importer_cache", "where our modules were looked for"),
    Expected("paths.meta_path", "our finder wraps Megatron's loop when it is imported", ours="LoopFinder"),
    Expected(
        "modules.*", "what our hook has imported, and the warm process for the loop and the launchers", added=True
    ),
    Expected("signals.SigCgt", "stacks are asked for by a real-time signal; the next line's", ours="10|12|[56][0-9]"),
    Expected("signals.handlers.SIGUSR[12]", "a scheduler may send them to all processes: they are for the agent"),
    Expected("*signals.SigIgn", "the same, of a rank that learns late that it is one (--run-path)", ours="10|12"),
    Expected("descriptors.[1-9][0-9][0-9]*", "board and stacks, out of the way of all small numbers", added=True),
    Expected("shared", "the board", ours="/memfd:mt-resilient.*"),
    Expected("process.prctl.pdeathsig", "a rank does not outlive its launcher"),
    Expected("atexit_callbacks", "tells the agent that the script is over"),
    Expected("libraries.atexit_callbacks", "the same"),
    Expected("hooks.excepthook", "tells the agent why the rank ends; calls the one before"),
    Expected("hooks.original", "the same"),
    Expected("libraries.excepthook", "the same"),
    Expected("*weakref_finalize", "unmaps the board when nobody views it any more"),
    Expected("*process.tasks", _OPENBLAS, warm=True),
    Expected("*process.status.Threads", _OPENBLAS, warm=True),
    Expected("libraries.tasks", _OPENBLAS, warm=True),
    Expected("*logging.loggers.torch.*", "torchrun's own modules are there, for the launchers", added=True, warm=True),
    Expected("*logging.handlers", "the same", warm=True),
    Expected(
        "*gc.frozen",
        "Python 3.12 starts with frozen objects; a forked rank thaws them with what was frozen for it",
        warm=True,
    ),
    Expected("libraries.gc", "the same", warm=True),
    Expected("drawn.hash", "one PYTHONHASHSEED for all lives of a job"),
)


def flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Path and value of each leaf; a list is one."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flat(item, f"{path}.{name}" if path else name)
    else:
        yield path, value


def differences(plain: dict[str, object], ours: dict[str, object], *, warm: bool) -> list[str]:
    """A line for each observation that is not the same and is not expected to differ."""
    left, right = dict(flat(plain)), dict(flat(ours))
    found = []
    for path in {**left, **right}:
        one, other = left.get(path, MISSING), right.get(path, MISSING)
        if one != other and not any(
            e.covers(path.removeprefix("imported."), one, other, warm) for e in EXPECTED_DIFFERENCES
        ):
            found.append(f"{path}: {one!r:.300} under torchrun, {other!r:.300} here")
    return found
