"""The command `explain`, and functions that other commands share with it. They always read the run directory, and also etcd while an agent
runs."""

from __future__ import annotations

import heapq
import json
import os
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
    if given is not None:
        if not (given / "journal.jsonl").exists() and not (given / "endpoint").exists():
            raise UsageError(f"{given} is no run directory; mt-resilient run prints the one it uses")
        return RunDirectory(given)
    found = [path for path in Path("mt-runs").glob("*") if (path / "journal.jsonl").exists()]
    if not found:
        raise UsageError(
            f"there is no run under {Path('mt-runs').absolute()}; name its directory with --run-dir (for report: without that word)"
        )
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
    return numbered(latest(line for line in lines if line["kind"] == "incident").values(), world)


def numbered(told: Iterable[Incident], world: World | None) -> dict[str, Incident]:
    """Return these incidents, which are from the journals and in order of time, and those of etcd, by number."""
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
        lines = needs.told(incident, time_of(incident.at_s), number)
        print("\n".join(map(formatting.printable, lines)), end="\n\n")
    lost = sum(i.lost_steps for i in told.values())
    took = sum(sum(i.phases_s.values()) for i in told.values())
    print(
        f"{len(told)} incident{'s' if len(told) > 1 else ''}, {formatting.steps(lost)} computed again, {formatting.seconds(took)} in all"
    )
    return 0
