"""Computes this node's status (what the agent reports to other nodes about its ranks) from the ranks' pages and the ended processes. Pure
functions, without I/O."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...checkpoint.arena.slot_header import Stamp
from ...resilience.ipc.board_events import REWINDS, SIGHTINGS, Noted
from ...resilience.ipc.board_layout import Page
from ...resilience.ipc.handoff import Reached
from ...resilience.ipc.page_validation import MOST
from ...resilience.model.node import NodeStatus
from ...resilience.model.signals import InPlaceRewind, RankExit, RankStall, Repeated, Sighting
from ...resilience.model.types import Doing, Generation, Rank, RankPhase, Step
from .worker_group import Watched, WorkerGroup

_ORPHANED_S = 1.0
"""A rank counts as ended by its launcher's death if it ended at most this many seconds before the launcher."""


def ended_well(phase: int, code: int | None, launcher_code: int | None, left: bool = False) -> bool | None:
    """Return whether a rank that has ended did so as intended; None: not yet known.

    The end was intended if the exit code is 0, or if a signal ended the rank in the interpreter's teardown, after the script (`left`). If
    the exit code is unknown, the rank has failed if it was in its training loop. For a rank outside its training loop, the launcher's exit
    code decides, because the launcher reaps its ranks.
    """
    if code is not None:
        return code == 0 or (left and code < 0)
    if RankPhase.RESTORING <= phase < RankPhase.FINISHED and not left:
        return False
    return None if launcher_code is None else launcher_code == 0


def exits(group: WorkerGroup, pages: Sequence[Page]) -> tuple[RankExit, ...]:
    """Return the ranks that ended although they should not have. If no rank explains the launcher's failure, return the launcher. If ranks
    failed, also return ranks that exited with code 0 before the end of their loop, because other ranks may have waited for them."""
    launcher = group.launcher
    gone = {n: (pages[n], process) for n, process in group.ranks.items() if process.ended_s}
    failed = [
        n
        for n, (p, end) in gone.items()
        if ended_well(p.phase, _code(p, end), launcher.code, bool(p.left)) is False and not _follows(p, end, launcher)
    ]
    early = [n for n, (p, end) in gone.items() if end.code == 0 and RankPhase.RESTORING <= p.phase < RankPhase.FINISHED]
    found = [_rank_exit(*gone[n]) for n in gone if failed and n in (*failed, *early)]
    ended_s = [process.ended_s for process in group.watched() if process.ended_s]
    found += [
        _seen_exit(p, min(ended_s))
        for n, p in enumerate(pages)
        if ended_s and n not in failed and (p.seen_code or 0) < 0 and not (p.left and p.pid == p.launched_pid)
    ]
    if launcher.ended_s and launcher.code != 0 and not found and not _all_done(group, pages):
        started = any(page.step >= 0 for page in pages)
        told_signal = max(page.launcher_signal for page in pages)
        found.append(
            RankExit(
                rank=Rank(-1),
                at_s=launcher.ended_s,
                code=-told_signal or launcher.code,
                out_of_memory=launcher.out_of_memory,
                oom_killer_active=launcher.oom_killer_active,
                started=started,
                error=group.unimportable or _any_word(pages),
                kind="no torch" if group.unimportable else "exit",
            )
        )
    # All ranks of thousands of nodes may end at the same time, and people read only one traceback, or one rank's last lines.
    first = sorted(found, key=lambda gone: gone.at_s)  # the other ranks' tracebacks are often about this one's end
    told = next((gone for gone in first if gone.traceback), next((gone for gone in first if gone.last_lines), None))
    return tuple(gone if gone is told else replace(gone, traceback="", last_lines="") for gone in found)


def _code(page: Page, process: Watched) -> int | None:
    """Return the exit code of a rank. If the rank ended before the agent could watch it, the code is the launcher's report. A script that
    caught the error that ends the rank, and then exited with code 0, has failed."""
    code = page.seen_code if process.code is None else process.code
    return 1 if code == 0 and page.farewell().get("caught") else code


def _follows(page: Page, process: Watched, launcher: Watched) -> bool:
    """Return whether this rank ended only as a consequence: the launcher ended it, or the launcher or the rank's wrapper process died."""
    if page.farewell() or process.fenced or process.nonsense:
        return False
    if (
        process.out_of_memory and not page.ended_by_launcher
    ):  # otherwise the kernel may have killed a data loader's worker before
        return False
    orphaned = (launcher.code or 0) < 0 and process.ended_s > launcher.ended_s - _ORPHANED_S
    wrapped = page.launched_pid not in (0, page.pid) and (page.seen_code or 0) < 0
    return page.ended_by_launcher or wrapped or (orphaned and process.code in (None, -signal.SIGKILL))


def _seen_exit(page: Page, at_s: float) -> RankExit:
    """Return the exit of a process that the launcher had started as a rank, and that a signal ended. The process is a wrapper if another
    process trains."""
    return RankExit(
        rank=Rank(page.rank),
        at_s=at_s,
        code=page.seen_code,
        started=page.stepped_ns > 0,
        kind="exit" if page.pid in (0, page.launched_pid) else "wrapper",
    )


def _all_done(group: WorkerGroup, pages: Sequence[Page]) -> bool:
    """Return whether every rank has ended as intended, and at least one by a signal in its teardown. If so, that signal is the only cause
    of the launcher's non-zero exit code."""
    launcher_code = group.launcher.code
    well = [
        process.ended_s > 0 and ended_well(pages[n].phase, process.code, launcher_code, bool(pages[n].left)) is True
        for n, process in group.ranks.items()
    ]
    return len(well) == len(pages) and all(well) and any((process.code or 0) < 0 for process in group.ranks.values())


def _rank_exit(page: Page, process: Watched) -> RankExit:
    words = page.farewell()
    code, step = _code(page, process), words.get("step")
    if words and (code is None or (code < 0 and code != -signal.SIGINT)):
        code = 1  # an exception ended the rank. A signal during its exit came from the launcher, after another rank's failure
    kind = str(words.get("kind", "exit"))
    kind = "fenced" if process.fenced else "nonsense" if process.nonsense else kind
    kind = "broken" if process.missing and not words else kind
    return RankExit(
        rank=Rank(page.rank),
        at_s=process.ended_s,
        code=code,
        error=process.nonsense or str(words.get("error", f"{process.missing} is not there" if process.missing else "")),
        traceback=str(words.get("traceback", "")),
        last_lines="" if words.get("traceback") else process.last_lines,
        out_of_memory=process.out_of_memory,
        oom_killer_active=process.oom_killer_active,
        started=page.stepped_ns > 0 or page.phase == RankPhase.FINISHED,  # there may have been no step left to compute
        through=page.phase == RankPhase.FINISHED,
        kind=kind,
        step=Step(step if isinstance(step, int) and -1 <= step <= MOST else -1),
    )


def _any_word(pages: Sequence[Page]) -> str:
    return next((str(words["error"]) for page in pages if (words := page.farewell()).get("error")), "")


def reached(pages: Sequence[Page], resume_step: int) -> tuple[Reached, ...]:
    """Return the last step of each local rank with its figures, if ranks that resume at `resume_step` replay that step with the same data.
    Otherwise empty."""
    said = (Reached(page.step, page.loss, page.grad_norm) for page in pages)
    again = all(page.tells >= 2 and page.step > resume_step for page in pages)
    return tuple(said) if again else ()


def rewinds(pages: Sequence[Page], generation: int, offset_s: float, told: int) -> list[InPlaceRewind]:
    """Return the rewinds that all local ranks have finished, from number `told` + 1 on. A page keeps only the last eight. A rewind whose
    entry is just being overwritten is omitted."""
    done = min((page.rewinds for page in pages), default=0)
    found = []
    for ordinal in range(max(told, done - REWINDS.kept) + 1, done + 1):
        try:
            seen = [page.rewind(ordinal) for page in pages]
        except ValueError:
            continue
        found.append(
            InPlaceRewind(
                **_noted(seen, ordinal, generation, offset_s),
                reached=Step(seen[0].reached),
                order=seen[0].order,
                ranks=seen[0].ranks,
                restore_s=max(each.done_ns - each.at_ns for each in seen) / 1e9,
            )
        )
    return found


def sightings(pages: Sequence[Page], generation: int, offset_s: float) -> tuple[Sighting, ...]:
    """Return the last faults that all local ranks have recorded without acting on them."""
    done = min((page.sightings for page in pages), default=0)
    found = []
    for ordinal in range(max(0, done - SIGHTINGS.kept) + 1, done + 1):
        try:
            seen = [page.sighting(ordinal) for page in pages]
        except ValueError:
            continue
        last = Step(min(each.last for each in seen))
        noted = _noted(seen, ordinal, generation, offset_s)
        outcome = min(each.outcome for each in seen)
        found.append(Sighting(**noted, seen=Step(seen[0].seen), last=last, outcome=outcome))
    return tuple(found)


def _noted(seen: Sequence[Noted], ordinal: int, generation: int, offset_s: float) -> dict[str, Any]:
    """Return the fields of a fault that all ranks have recorded, as the first rank reports them. `to` is the lowest step of all ranks,
    because a rank that only observes may lack snapshots that others have."""
    first = seen[0]
    return {
        "ordinal": ordinal,
        "generation": Generation(generation),
        "cause": first.kind,
        "onset": Step(first.onset),
        "to": Step(min(each.to for each in seen)),
        "remedy": first.remedy,
        "window": first.window,
        "value": first.value,
        "expected": first.expected,
        "at_s": first.at_ns / 1e9 + offset_s,
    }


def snapshots(memory: Sequence[Stamp], durable: Sequence[Stamp]) -> dict[str, Any]:
    """Return the fields of a status that name this node's snapshots, in memory and on disk."""
    return {
        "memory_steps": tuple(Step(stamp.step) for stamp in memory),
        "courses": tuple((stamp.generation, stamp.rewinds) for stamp in memory),
        "durable_steps": tuple(Step(stamp.step) for stamp in durable),
        "durable_courses": tuple((stamp.generation, stamp.rewinds) for stamp in durable),
    }


def status(
    kept: NodeStatus,
    group: WorkerGroup | None,
    pages: Sequence[Page],
    *,
    offset_s: float,
    told: tuple[InPlaceRewind, ...],
    stalls: tuple[RankStall, ...] = (),
    stuck: bool = False,
    snapshot: str = "",
) -> NodeStatus:
    """Return the node's status. kept: the part of it that needs no worker group. offset_s: wall clock minus monotonic clock, in seconds.
    told: in-place rewinds so far. stuck: all training loops are over, and the rest of the worker group hangs in its teardown. snapshot: the
    last snapshot request that was passed on to the ranks."""
    if group is None:
        return kept

    def mark(name: str) -> float:
        times = [getattr(page, name) for page in pages]
        return max(times) / 1e9 + offset_s if all(times) else 0.0

    steps = [page.step for page in pages]
    over = stuck or (group.launcher.ended_s > 0 and (group.launcher.code == 0 or _all_done(group, pages)))
    # The rank was in its training loop, but exited with code 0: the script has broken out of the loop.
    early = (RankPhase.RESTORING, RankPhase.TRAINING, RankPhase.STOPPED)
    stopped = any(page.phase in early for page in pages)
    return replace(
        kept,
        min_step=Step(min(steps)),
        max_step=Step(max(steps)),
        alive=sum(not p.ended_s for p in group.ranks.values()),
        pids=tuple(group.ranks[n].pid if n in group.ranks else 0 for n in range(len(pages))),
        attached_s=mark("attached_ns"),
        built_s=mark("built_ns"),
        restored_s=mark("restored_ns"),
        stepped_s=mark("stepped_ns"),
        replayed_s=mark("replayed_ns"),
        repeated=max(Repeated(page.repeated) for page in pages),
        finished=over and not stopped,
        stopped=over and stopped,
        exits=exits(group, pages),
        launcher_code=group.launcher.code if group.launcher.ended_s else None,
        sightings=sightings(pages, kept.generation, offset_s),
        rewinds=told,
        launch=group.how,
        stalls=stalls,
        paused=all(page.doing == Doing.PAUSED for page in pages) and not any(p.ended_s for p in group.ranks.values()),
        declined=min(page.declined for page in pages),
        skips=all(page.tells == 2 for page in pages),
        other_data=any(page.tells == 1 for page in pages),
        snapshot=snapshot,
        unsaved=next((page.unsaved for page in pages if page.unsaved), ""),
        snapshot_step=Step(min(page.durable_step for page in pages)),
    )
