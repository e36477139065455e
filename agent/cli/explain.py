"""The commands `explain` and `snapshots`, and functions that `status` shares with them. They always read the run directory, and also etcd
while an agent runs."""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...checkpoint.backend import place
from ...checkpoint.backend.paths import CERTIFIED, Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog, commit
from ...checkpoint.durable.load_resharded import Saved
from ...checkpoint.durable.save_interval import SnapshotPolicy
from ...resilience.errors import FormatError, InternalError, MachineError, SnapshotError, StoreUnavailable, UsageError
from ...resilience.inprocess.tally import COURSE, RANDOMNESS
from ...resilience.model.cluster_state import World
from ...resilience.model.incident import Incident
from ...resilience.report import explain as story
from ...resilience.report.journal import Journal
from ...resilience.store.codec import loads
from ...resilience.store.etcd.access import Papers
from ...resilience.store.etcd.client import EtcdStore
from ...resilience.store.keys import Keys
from ...resilience.store.state_reader import read_world
from ...resilience.text import formatting
from ..run_directory import RunDirectory


def find_directory(given: Path | None) -> RunDirectory:
    """Return the run directory `given`, or the most recently used one under mt-runs. Raises UsageError if there is none."""
    if given is not None:
        if not (given / "journal.jsonl").exists() and not (given / "endpoint").exists():
            raise UsageError(f"{given} is no run directory; mt-resilient run prints the one it uses")
        return RunDirectory(given)
    found = [path for path in Path("mt-runs").glob("*") if (path / "journal.jsonl").exists()]
    if not found:
        raise UsageError(f"there is no run under {Path('mt-runs').absolute()}; name its directory with --run-dir")
    return RunDirectory(max(found, key=lambda path: (path / "journal.jsonl").stat().st_mtime))


def run_roots(given: Sequence[Path]) -> list[Path]:
    """Return the run directories that `given` names, each a run directory or a folder of them; by default, those under mt-runs. Raises
    UsageError if there are none."""
    found: list[Path] = []
    for path in given or [Path("mt-runs")]:
        here = [path] if (path / "journal.jsonl").exists() else sorted(j.parent for j in path.glob("*/journal.jsonl"))
        if not here:
            raise UsageError(
                f"there is no run in {path.absolute()}; mt-resilient run prints the directory that it uses"
            )
        found += here
    return list(dict.fromkeys(path.absolute() for path in found))


def named(where: str | None, run_dir: Path | None, kept: SnapshotPolicy) -> list[Place]:
    """Return the snapshots that `where` names, the newest first. None: all snapshots of the run directory `run_dir`, or of the most
    recently used one. A step or a snapshot's name: the matching snapshots of that run directory. A path or URL: a run directory, a place
    that holds `snapshots/`, or one snapshot. Raises UsageError if there are none."""
    if where is None:
        return catalog.committed(find_directory(run_dir).kept())
    if "://" not in where and not Path(where).exists() and (where.isdecimal() or Attempt.parse(where)):
        return _chosen(find_directory(run_dir), where)
    if (Path(where) / "journal.jsonl").exists():
        return catalog.at(RunDirectory(Path(where)).kept())
    return catalog.at(place.at(place.address(where, kept.endpoint, kept.region)))


def look(directory: RunDirectory) -> World | None:
    """Return the job's present data from etcd. None: no agent runs here, or etcd does not answer. For a job of several nodes, no agent has
    to run here, because etcd and other agents may still run."""
    place = directory.agent() or (directory.published() if directory.several else None)
    if place is None:
        return None
    keys = Keys(place["job"])
    access = Papers(**place.get("papers", {})).access(os.environ)
    try:
        with closing(EtcdStore(place["endpoints"], deadline_s=2.0, access=access)) as store:
            return read_world(keys, {k: e.value for k, e in store.range(keys.root).items()})
    except StoreUnavailable:
        return None


def time_of(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%Y-%m-%d %H:%M:%S")


def incidents(directory: RunDirectory, world: World | None = None) -> dict[str, Incident]:
    """Return the latest state of all incidents, by number, from the journals and etcd. With several nodes, only the leader writes incidents
    into its journal, so etcd completes the list. Incidents that are damaged, or from another version of the program, are skipped."""
    lines = heapq.merge(*(Journal(path).read() for path in directory.journals), key=lambda line: line["at_s"])
    found = latest(line for line in lines if line["kind"] == "incident")
    known = len(found)
    for told in world.incidents if world else ():
        found[told.generation, told.id, told.at_s] = told
    in_order = sorted(found) if len(found) > known else [*found]
    return {str(position): found[key] for position, key in enumerate(in_order, 1)}


def latest(lines: Iterable[dict[str, Any]]) -> dict[tuple[int, str, float], Incident]:
    """Return the latest state of each incident. lines: of the kind `incident`, from journals, in order of time."""
    found: dict[tuple[int, str, float], Incident] = {}
    for line in lines:
        with suppress(InternalError):
            told = loads(Incident, json.dumps(line.get("incident")))
            found[told.generation, told.id, told.at_s] = told
    return found


def explain(directory: RunDirectory, which: str | None) -> int:
    """Print the report on one incident, or the reports on all incidents and their total cost. Return the exit code."""
    world = look(directory)
    told = incidents(directory, world)
    if which is not None:
        wanted = which.lstrip("0") or "0"
        if wanted not in told:
            known = f"known are 1 to {len(told)}" if told else "there was none so far"
            raise UsageError(f"there is no incident {which} in {directory.root}; {known}")
        told = {wanted: told[wanted]}
    if not told:
        print(f"no incident so far in {directory.root}")
        if world is None and directory.several:
            print(
                "The leader records incidents, and etcd does not answer. Look into the run directories of the other nodes"
            )
        return 0
    for number, incident in told.items():
        print("\n".join(story.lines(incident, time_of(incident.at_s), number)), end="\n\n")
    lost = sum(i.lost_steps for i in told.values())
    took = sum(sum(i.phases_s.values()) for i in told.values())
    print(
        f"{len(told)} incident{'s' if len(told) > 1 else ''}, {formatting.steps(lost)} computed again, {formatting.seconds(took)} in all"
    )
    return 0


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


def _chosen(directory: RunDirectory, which: str) -> list[Place]:
    """Return the snapshots whose step or name is `which`, the newest first. Raises UsageError if there is none."""
    found = [
        each for each in catalog.committed(directory.kept()) if which in (each.name, str(_attempt(each).stamp.step))
    ]
    if not found:
        raise UsageError(f"no committed snapshot {which} in {directory.root}; see: mt-resilient snapshots ls")
    return found


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
        ("directory", "left"),
    ):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    others = []
    for snapshot in snapshots:
        stamp = _attempt(snapshot).stamp
        try:
            certified = "yes" if snapshot.there(CERTIFIED) else "–"
            found = commit.read_commit(snapshot)
        except SnapshotError:  # the snapshot is damaged, or was deleted just now as too old
            told = "?", "–", "–", "–"
        except FormatError as error:
            told = "–", "–", "–", "–"
            others.append(str(error))
        else:
            told = str(found.world), f"{found.figures.bytes / 1e6:.1f}", time_of(found.figures.written_s), certified
        table.add_row(str(stamp.step), str(stamp.generation), *told, snapshot.name)
    Console(highlight=False, width=200).print(table)
    for sentence in others:
        print(sentence)
    return 0


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
