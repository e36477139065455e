"""The command `explain`, and functions that other commands share with it. All of them read the run directory; while an agent runs, they
also read etcd."""

from __future__ import annotations

import heapq
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from ...resilience.errors import InternalError, StoreUnavailable, UsageError
from ...resilience.model.cluster_state import World
from ...resilience.model.incident import Incident
from ...resilience.report import needs
from ...resilience.report.journal import Journal
from ...resilience.report.json_outputs import incident_object
from ...resilience.store.codec import loads, printed
from ...resilience.store.etcd.access import Papers
from ...resilience.store.etcd.client import EtcdStore
from ...resilience.store.keys import Keys
from ...resilience.store.state_reader import read_world
from ...resilience.text import formatting
from ..run_directory import RunDirectory


def find_directory(given: Path | None) -> RunDirectory:
    """Return the run directory `given`, or the most recently used one under mt-runs. Raises UsageError if there is none."""
    if given is not None and (given / "endpoint").exists():
        return RunDirectory(given)
    found = _with_journal(given) if given is not None else _below(Path("mt-runs"))
    if not found and given is not None:
        raise UsageError(f"{given} is no run directory; mt-resilient run prints the one it uses")
    if not found:
        raise UsageError(
            f"there is no run under {Path('mt-runs').absolute()}; name its directory with --run-dir DIR (for the command report: DIR alone)"
        )
    return RunDirectory(max(found, key=lambda path: (path / "journal.jsonl").stat().st_mtime))


def find_running(given: Path | None) -> RunDirectory:
    """Return the run directory to which an order goes: of the nodes of the job `given`, the one whose agent runs on this machine. None:
    that of the only job under mt-runs that has an agent on this machine; it is printed. If no agent runs, return the one that
    `find_directory` returns. Raises UsageError if there is none, or if several jobs run."""
    if given is not None or not (jobs := _running(Path("mt-runs"))):
        return on_this_machine(find_directory(given))
    if len(jobs) > 1:
        where = formatting.listed([each.root for each in jobs.values()])
        raise UsageError(
            f"{len(jobs)} jobs run here; nothing was done. Name the directory of one with --run-dir: {where}"
        )
    (found,) = jobs.values()
    print(
        f"for the job {(found.agent() or {}).get('job')}, in {formatting.printable(str(found.root))}", file=sys.stderr
    )
    return found


def on_this_machine(directory: RunDirectory) -> RunDirectory:
    """Return the run directory, among those of the job's nodes, whose agent runs on this machine; else `directory`."""
    return next((each for each in directory.nodes if each.agent() is not None), directory)


def _running(folder: Path) -> dict[Path, RunDirectory]:
    """Return a run directory of each job under `folder` that has an agent on this machine, by the directory that the job's nodes share."""
    found: dict[Path, RunDirectory] = {}
    for run in map(RunDirectory, _below(folder)):
        if run.agent() is not None:
            found.setdefault(run.root.parent.parent if run.root.parent.name == "nodes" else run.root, run)
    return found


def _with_journal(path: Path) -> list[Path]:
    """Return `path` if it has a journal, else the run directories of the nodes in it (`agent/join/static_nodes.py`)."""
    return [path] if (path / "journal.jsonl").exists() else sorted(j.parent for j in path.glob("nodes/*/journal.jsonl"))


def _below(folder: Path) -> list[Path]:
    return [run for path in sorted(folder.glob("*")) for run in _with_journal(path)]


def run_roots(given: Sequence[Path]) -> list[Path]:
    """Return the run directories that `given` names, each a run directory or a folder of them; by default, those under mt-runs. Raises
    UsageError if there are none."""
    found: list[Path] = []
    for path in given or [Path("mt-runs")]:
        here = _with_journal(path) or _below(path)
        if not here:
            raise UsageError(
                f"there is no run in {path.absolute()}; mt-resilient run prints the directory that it uses"
            )
        found += here
    return list(dict.fromkeys(path.absolute() for path in found))


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


def zoned(at_s: float) -> str:
    """Return the time with its difference from UTC, for a text that is read elsewhere, or beside times of another zone."""
    return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")


def incidents(directory: RunDirectory, world: World | None = None) -> dict[str, Incident]:
    """Return the latest state of all incidents, by number, from the journals and etcd. With several nodes, only the leader writes incidents
    into its journal, and another node may have led later. So the journals of nodes with directories beside this one are read too, and
    etcd completes the list. Records of incidents that are damaged, or from another version of the program, are skipped."""
    lines = heapq.merge(*(Journal(each.journal).read() for each in directory.nodes), key=lambda line: line["at_s"])
    return numbered(latest(line for line in lines if line["kind"] == "incident").values(), world)


def numbered(told: Iterable[Incident], world: World | None) -> dict[str, Incident]:
    """Return all incidents by number. told: those from the journals, in order of time. world: adds those from etcd."""
    found = {(each.generation, each.id, each.at_s): each for each in told}
    known = len(found)
    for each in world.incidents if world else ():
        found[each.generation, each.id, each.at_s] = each
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


def explain(directory: RunDirectory, which: str | None, as_json: bool) -> int:
    """Print the report on one incident, or the reports on all incidents and their total cost. Return the exit code."""
    world = look(directory)
    told = incidents(directory, world)
    if which is not None:
        wanted = which.lstrip("0") or "0"
        if wanted not in told:
            known = f"known are 1 to {len(told)}" if told else "there was none so far"
            raise UsageError(f"there is no incident {which} in {directory.root}; {known}")
        told = {wanted: told[wanted]}
    if as_json:
        print(printed([incident_object(number, incident) for number, incident in told.items()]))
        return 0
    if not told:
        print(f"no incident so far in {directory.root}")
        if world is None and directory.several:
            print(
                "The leader records incidents, and etcd does not answer. Look into the run directories of the other nodes"
            )
        return 0
    for number, incident in told.items():
        lines = needs.told(incident, zoned(incident.at_s), number)
        print("\n".join(map(formatting.printable, lines)), end="\n\n")
    lost = sum(i.lost_steps for i in told.values())
    took = sum(sum(i.phases_s.values()) for i in told.values())
    print(
        f"{len(told)} incident{'s' if len(told) > 1 else ''}, {formatting.steps(lost)} computed again, {formatting.seconds(took)} in all"
    )
    return 0
