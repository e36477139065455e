"""Names on durable storage. Pure.

    <root>/snapshots/0000000100-g3-5f0c91aa0000/      one attempt to write step 100 of generation 3
        rank-00000/zarr.json, rank-00000/c/0/0        a rank's slab
        rank-00000.json                               its manifest, written after the slab
        COMMIT                                        written after all manifests: only now there is a snapshot
        CERTIFIED                                     many clean steps have followed, and its replicas agreed

All nodes of a job give an attempt the same name without communication. The number at its end is the run's (agreed when the run starts),
followed by the count of rewinds. So an attempt's name stands for its bytes, and a node that finds its own part complete need not write it
again. The next life of the job has another number, and a rewind another count. So a request that hung when its process died cannot hit
another attempt. An object store may carry out such a deletion an hour later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..arena.slot_header import Stamp
from .place import Place

SNAPSHOTS = "snapshots"
JOB = ".job"
"""A file beside the snapshots. Its content says which job owns them; if it is missing, the place is not the job's, or not mounted."""

COMMIT = "COMMIT"
REJECTED = "REJECTED"
"""COMMIT is renamed to this when the snapshot failed to restore. If both are there, only REJECTED counts."""
REASON = "REASON"
CERTIFIED = "CERTIFIED"
"""Beside COMMIT: the state has proved stable. The file's content does not matter. Without COMMIT, or with REJECTED, it does not count."""
_NAME = re.compile(r"(\d{10,})-g(\d+)-([0-9a-f]{8})([0-9a-f]{4,})")

_END = 1 << 60
"""Limit of generations, rewinds and steps: a slot's header has 8 bytes for each."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    run: str
    """Eight hexadecimal digits: the same on all nodes, and others for each run of the job."""
    stamp: Stamp

    def __str__(self) -> str:
        return f"{self.stamp.step:010d}-g{self.stamp.generation}-{self.run}{self.stamp.rewinds:04x}"

    @classmethod
    def parse(cls, name: str) -> Attempt | None:
        """Return the attempt that a directory's name stands for; None for any other directory."""
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
