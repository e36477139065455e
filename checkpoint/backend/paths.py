"""Names on durable storage. Pure.

    <root>/snapshots/0000000100-g3-5f0c91aa0000/      one attempt to write step 100 of generation 3
        rank-00000/zarr.json, rank-00000/c/0/0        a rank's slab (its tensors' bytes)
        rank-00000.json                               its manifest, written after the slab
        COMMIT                                        written after all manifests: only now the snapshot exists
        CERTIFIED                                     many clean steps have followed, and its replicas agreed
        LEFT-1, BACK-1, LEFT-2, …                     an order left it, another came back to it, …
        ORDERED, KEPT                                 a person ordered it; a person keeps it from being deleted

All nodes of a job give an attempt the same name without communication. The name ends with the run's number (agreed when the run starts) and
the count of rewinds. So attempts of the same name have the same bytes. A node whose own part is complete need not write it again. The next
run of the job has another number, and a rewind changes the count. So a late request of a dead process cannot affect another attempt. An
object store may execute such a request, for example a deletion, an hour later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..arena.slot_header import Stamp
from .place import Place

SNAPSHOTS = "snapshots"
JOB = ".job"
"""A file beside the snapshots that names the job that owns them. If the file is missing, this is not the job's directory, or its storage is
not mounted."""

COMMIT = "COMMIT"
REJECTED = "REJECTED"
"""COMMIT is renamed to REJECTED when the snapshot is set aside for good: it is wrong, or the ranks went back behind it by themselves. If
both files exist, the snapshot counts as rejected."""
LEFT, BACK = "LEFT-{}", "BACK-{}"
TURNS = tuple(mark.format(number) for number in range(1, 1000) for mark in (LEFT, BACK))
"""LEFT-1, BACK-1, LEFT-2, …: additional files beside COMMIT, each written once and never deleted alone. An order to rewind to an earlier
step writes the next LEFT. An order that comes back to this snapshot writes the next BACK. If the last of these files is a LEFT, the state
is good, but does not belong to the lineage, and only another order may use it. A LEFT contains why and when the order left the snapshot."""
REASON = "REASON"
"""Why the snapshot was rejected."""
ORDERED = "ORDERED"
KEPT = "KEPT"
CERTIFIED = "CERTIFIED"
"""An additional file beside COMMIT: the state has proved stable. The content of CERTIFIED does not matter. Without COMMIT, or with
REJECTED, it is ignored."""
_NAME = re.compile(r"(\d{10,})-g(\d+)-([0-9a-f]{8})([0-9a-f]{4,})")

_END = 1 << 60
"""Upper bound of generations, rewinds and steps: a slot's header has 8 bytes for each number."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    run: str
    """Eight hexadecimal digits: the same on all nodes, and different in each run of the job."""
    stamp: Stamp

    def __str__(self) -> str:
        return f"{self.stamp.step:010d}-g{self.stamp.generation}-{self.run}{self.stamp.rewinds:04x}"

    @classmethod
    def parse(cls, name: str) -> Attempt | None:
        """Return the attempt that a directory's name encodes; None for any other name."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        step, generation, run, rewinds = found.groups()
        attempt = cls(run=run, stamp=Stamp(int(generation), int(rewinds, 16), int(step)))
        return attempt if str(attempt) == name and max(attempt.stamp) < _END else None

    def under(self, root: Place) -> Place:
        return root / SNAPSHOTS / str(self)


def slab_name(rank: int) -> str:
    return f"rank-{rank:05d}"


def manifest_name(rank: int) -> str:
    return f"rank-{rank:05d}.json"
