"""The command `snapshots`: lists, verifies, digests, keeps and removes the snapshots on disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ...checkpoint.backend import paths, place
from ...checkpoint.backend.paths import Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog, commit
from ...checkpoint.durable.load_resharded import Saved
from ...checkpoint.durable.save_interval import SnapshotPolicy
from ...resilience.decide.rewind_orders import pending
from ...resilience.errors import FormatError, MachineError, SnapshotError, UsageError
from ...resilience.inprocess.tally import COURSE, RANDOMNESS
from ...resilience.model.generation import GenerationRecord, RewindOrder
from ...resilience.report.json_outputs import SnapshotObject
from ...resilience.store.codec import printed
from ...resilience.text import formatting
from ..run_directory import RunDirectory
from .explain import find_directory, look, time_of


def named(where: str | None, run_dir: Path | None, kept: SnapshotPolicy) -> list[Place]:
    """Return the snapshots that `where` names, the newest first. None: all snapshots of the run directory `run_dir`, or of the most
    recently used one. A step or a snapshot's name: the matching snapshots of that run directory. A path or URL: a run directory, a place
    that holds `snapshots/`, or one snapshot. Raises UsageError if there are none."""
    root, which = _asked(where, run_dir, kept)
    if which:
        return _chosen(find_directory(run_dir), which)
    return catalog.committed(root) if where is None else catalog.at(root)


def snapshots(found: list[Place], action: str, whole: bool) -> int:
    """List, verify or digest the snapshots. Return the exit code: 6 if `verify` finds a damaged snapshot. whole: digest the global
    tensors."""
    if not found:
        print("there is no committed snapshot")
        return 0
    if action == "digest" and whole:
        with commit.reading(found[0]):
            total = Saved(found[0], proving=True).digest()
        print(f"{total}  step {_attempt(found[0]).stamp.step}, of the global tensors")
        return 0
    if action == "digest":
        ours = [f"{COURSE}/", f"{RANDOMNESS}/data/"]
        print(f"{catalog.digest(found[0], exclude=ours)}  step {_attempt(found[0]).stamp.step}")
        return 0
    return _verify(found) if action == "verify" else _list(found)


def list_all(where: str | None, run_dir: Path | None, kept: SnapshotPolicy) -> int:
    """Print the committed snapshots, then those that were set aside, each with the reason. Parameters: as for `named`. Return the exit
    code."""
    root, which = _asked(where, run_dir, kept)
    seen, users = catalog.look_at_users(root)

    def matching(attempts: Collection[Attempt]) -> list[Attempt]:
        asked = (each for each in attempts if not which or which in _names(each))
        return sorted(asked, key=lambda attempt: attempt.stamp, reverse=True)

    snapshots([attempt.under(root) for attempt in matching(seen.durable)], "ls", whole=False)
    for attempts, verdict in ((seen.left, _GOOD), (seen.rejected, _WRONG)):
        by_reason: dict[str, list[str]] = {}
        for attempt in matching(attempts):
            words, at_s = commit.reason(attempt.under(root), seen.left.get(attempt, paths.REASON))
            yours = [word for name, word in _YOURS.items() if name in users.get(attempt, ())]
            when = [f"set aside at {time_of(at_s)}"] if at_s is not None else []
            by_reason.setdefault(words, []).append(f"    {attempt}  {', '.join((*when, *yours))}".rstrip())
        for words, lines in by_reason.items():
            print("\n".join((f"{verdict}: {words}", *lines)))
    if not matching((*seen.left, *seen.rejected)):
        print("no snapshot is set aside")
    return 0


def keep(directory: RunDirectory, which: str, undo: bool) -> int:
    """Protect the snapshot with this step or name from being deleted as too old. undo: end that protection instead. Print a sentence.
    Return the exit code."""
    root = directory.kept()
    seen, users = catalog.look_at_users(root)
    attempt = choose(which, [*_all(seen)], directory)
    snapshot, marks = attempt.under(root), users.get(attempt, set())
    if not undo:
        with _naming(f"{attempt} could not be marked as kept"):
            exists = commit.mark(snapshot, paths.KEPT)
        if not exists:
            raise SnapshotError(f"{attempt} was deleted just now; nothing was kept")
        print(f"{attempt} stays until you remove it; to undo this: mt-resilient snapshots keep {attempt} --undo")
        return 0
    for name in marks & {paths.KEPT}:
        snapshot.delete(name)
    yours = paths.ORDERED in marks or attempt in seen.left
    until = "snapshots.keep_own_h are over" if yours else "it is too old (snapshots.keep)"
    print(f"{attempt} {'is deleted when ' + until if paths.KEPT in marks else 'was not kept'}")
    return 0


def remove(directory: RunDirectory, names: Sequence[str]) -> int:
    """Delete the snapshots with these steps or names. Return the exit code. If one of them is needed, delete none and raise UsageError."""
    root = directory.kept()
    seen, users = catalog.look_at_users(root)
    chosen = [*dict.fromkeys(choose(name, [*_all(seen)], directory) for name in names)]
    world = look(directory)
    if world is None and directory.agent():
        raise MachineError(
            "etcd does not answer, so it is not known which snapshots the running job needs. Nothing was removed"
        )
    why = needed(seen, users, chosen, world.record if world else None, pending(world) if world else None)
    if why:
        raise UsageError(f"{why}. Nothing was removed")
    for attempt in chosen:
        with _naming(f"{attempt} could not be removed, or not wholly"):
            gone = commit.delete(attempt.under(root))
        if not gone:
            raise MachineError(f"a process reads {attempt}; it was not removed. Try again later")
        print(f"{attempt} is removed")
    return 0


@contextmanager
def _naming(failed: str) -> Iterator[None]:
    """Put `failed` in front of the message of an error from storage."""
    try:
        yield
    except MachineError as error:
        raise MachineError(f"{failed}: {error}") from error


def needed(
    seen: catalog.Catalog,
    marked: dict[Attempt, set[str]],
    chosen: Sequence[Attempt],
    record: GenerationRecord | None,
    rewind: RewindOrder | None = None,
) -> str:
    """Return why one of the chosen snapshots must stay; empty: all may go. record: the job's present generation, if etcd knows one. rewind:
    the order that the ranks have not obeyed yet."""
    for attempt in chosen:
        if paths.KEPT in marked.get(attempt, ()):
            return f"{attempt} is kept. First undo that: mt-resilient snapshots keep {attempt} --undo"
    if seen.durable and {*seen.durable} <= {*chosen}:
        return f"{seen.durable[0]} is the last snapshot from which this job can continue; to start anew, name another --run-dir"
    if record is None or record.over:
        return ""
    orders = [order.left for order in (record.rewind, record.begins) if order]
    certified = [attempt for attempt in seen.durable if attempt in seen.certified]
    for attempt in chosen:
        if str(attempt) in orders or (rewind and attempt in seen.durable and attempt.stamp.step == rewind.to):
            return f"an order to rewind goes to {attempt}"
        if attempt in seen.durable and attempt.stamp.step == record.resume_step:
            return f"the running ranks have started from {attempt}"
        if attempt in (*seen.durable[:1], *certified[:1]):
            kind = "newest" if attempt in seen.durable[:1] else "newest certified"
            return f"after a fault the running job may continue from {attempt}: it is the {kind} snapshot"
    return ""


def _all(seen: catalog.Catalog) -> Collection[Attempt]:
    return (*seen.durable, *seen.left, *seen.rejected)


def choose(which: str, among: Sequence[Attempt], directory: RunDirectory) -> Attempt:
    """Return the snapshot whose step, name or path is `which`. Raises UsageError unless there is exactly one."""
    root = directory.kept()
    found = [each for each in among if which in (*_names(each), str(each.under(root)))]
    if len(found) > 1:
        raise UsageError(
            f"{len(found)} snapshots are of step {which}; nothing was done. Name one: {formatting.listed([*map(str, found)])}"
        )
    if not found:
        raise UsageError(f"no snapshot {which} in {directory.root}; see: mt-resilient snapshots ls --all")
    return found[0]


def _chosen(directory: RunDirectory, which: str) -> list[Place]:
    """Return the snapshots whose step or name is `which`, the newest first: those of the lineage, or else those that an ordered rewind set
    aside. Raises UsageError if there are none."""
    root = directory.kept()
    seen = catalog.look(root)
    for attempts in (seen.durable, seen.left):
        found = [each.under(root) for each in attempts if which in _names(each)]
        if found:
            return found
    raise UsageError(f"no snapshot {which} in {directory.root}; see: mt-resilient snapshots ls --all")


def _asked(where: str | None, run_dir: Path | None, kept: SnapshotPolicy) -> tuple[Place, str]:
    """Return the place that `where` names (`named`), and which step or name is asked for there; empty: all snapshots."""
    which = where if where and not Path(where).exists() and (where.isdecimal() or Attempt.parse(where)) else ""
    if where is None or which:
        return find_directory(run_dir).kept(), which
    if (Path(where) / "journal.jsonl").exists():
        return RunDirectory(Path(where)).kept(), ""
    return place.at(place.address(where, kept.endpoint, kept.region)), ""


def _names(attempt: Attempt) -> tuple[str, str]:
    """Return how a person may name the snapshot: by its name, or its step."""
    return str(attempt), str(attempt.stamp.step)


def _attempt(snapshot: Place) -> Attempt:
    attempt = Attempt.parse(snapshot.name)
    assert attempt
    return attempt


def _list(snapshots: list[Place]) -> int:
    table = Table(box=box.SIMPLE_HEAD)
    for heading, side in (
        ("step", "right"),
        ("generation", "right"),
        ("ranks", "right"),
        ("MB", "right"),
        ("written", "left"),
        ("certified", "left"),
        ("yours", "left"),
        ("directory", "left"),
    ):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    others = []
    for snapshot in snapshots:
        told = _object(snapshot)
        others += [told.problem] if told.problem else []
        ranks, size, written = "?", "–", "–"
        if told.bytes is not None and told.written_s is not None:
            ranks, size, written = str(told.ranks), f"{told.bytes / 1e6:.1f}", time_of(told.written_s)
        words = "yes" if told.certified else "–", ", ".join(told.yours) or "–", told.name
        table.add_row(str(told.step), str(told.generation), ranks, size, written, *words)
    Console(highlight=False, width=200).print(table)
    for sentence in others:
        print(sentence)
    return 0


_GOOD = "set aside, and good (mt-resilient rewind --to NAME comes back to one)"
_WRONG = "set aside, and never used again"
_YOURS = {paths.ORDERED: "ordered", paths.KEPT: "kept"}


def list_json(found: list[Place]) -> int:
    print(printed([_object(snapshot) for snapshot in found]))
    return 0


def _object(snapshot: Place) -> SnapshotObject:
    stamp = _attempt(snapshot).stamp
    known = SnapshotObject(
        name=snapshot.name,
        step=stamp.step,
        generation=stamp.generation,
        ranks=None,
        bytes=None,
        written_s=None,
        certified=False,
        yours=(),
        place=str(snapshot),
    )
    try:
        known = replace(
            known,
            certified=snapshot.there(paths.CERTIFIED),
            yours=tuple(word for name, word in _YOURS.items() if snapshot.there(name)),
        )
        found = commit.read_commit(snapshot)
    except SnapshotError:  # the snapshot is damaged, or was deleted just now as too old
        return known
    except FormatError as error:
        return replace(known, problem=str(error))
    return replace(known, ranks=found.world, bytes=found.figures.bytes, written_s=found.figures.written_s)


def _verify(found: list[Place]) -> int:
    codes = set()
    for snapshot in found:
        try:
            problems = catalog.verify(snapshot)
        except (FormatError, MachineError) as error:  # this snapshot cannot be judged, but others can
            codes.add(error.exit_code)
            problems = [str(error)]
        else:
            codes |= {SnapshotError.exit_code} if problems else set()
        print(f"{snapshot.name}: {'sound, every byte read' if not problems else '; '.join(problems)}")
    return max(codes, default=0)
