"""Bugs, to be planted into the real program. Each swaps one function, in every process of the run with faults, when its module has been
imported. Nothing in the program knows of it. `scripts/planted-bugs` runs a plan of faults for each, which the program passes without
the bug.

A function that does not exist any more ends the process. The file `executed` in the folder PLANTED_MARKS says that the bug was reached.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

STATE = "the final state has the bits"
LOST = "no more steps were lost"
COMPLETE = "every snapshot on disk is complete"
AT_ONCE = "no two generations"
INVENTED = "no fault was named"
LEFT = "nothing is left over"
KILL = '[[fault]]\nname = "rank_killed"\nrank = 1\nstep = 32\n'
POWER = '[[fault]]\nname = "power_lost"\nstep = 40\n'
FLIP = '[[fault]]\nname = "memory_flipped"\nrank = 1\nstep = 32\n'
CUT = '[[fault]]\nname = "network_cut"\nnode = 1\nstep = 8\nfor_s = 60\n'


@dataclass(frozen=True)
class Bug:
    module: str
    function: str
    """Its path in the module."""
    made: Callable[[Any], Callable[..., Any]]
    """What takes its place; it is given the real one."""
    plan: str
    promise: str
    """Beginning of the promise that it breaks."""
    nodes: int = 1
    spares: int = 0
    step_s: float = 0.0
    """How long each step of the training takes, so that the bug shows before its end."""


def _manifest_first(real: Any) -> Any:
    def write(self: Any, snapshot: Any, writer: Any) -> None:
        """The slab comes to its place 4 s after its manifest."""
        real(self, snapshot, writer)
        slab = snapshot.path / f"rank-{self.rank:05d}"
        held = slab.with_name(f".held-{self.rank}")
        slab.rename(held)
        threading.Timer(4.0, lambda: held.exists() and held.rename(slab)).start()

    return write


def _oldest(real: Any) -> Any:
    def from_slot(self: Any, slot: Any) -> Any:
        whole = [each for each in self._arena.slots if each.header().whole]
        return real(self, min(whole, key=lambda each: each.header().stamp))

    return from_slot


def _of_rank_0(real: Any) -> Any:
    def restore(self: Any, kept: Any) -> None:
        distributed, state = sys.modules["torch"].distributed, kept["torch"].clone()
        distributed.broadcast(state, 0)
        real(self, {**kept, "torch": state})

    return restore


def _one_further(real: Any) -> Any:
    return lambda self, place: real(self, place + place.new_tensor([0, 1, 0, 0, 0]))


def _for_a_while(real: Any) -> Any:
    began_s = 0.0

    def beat(self: Any, now_s: float) -> None:
        """From 12 to 20 s after its start, the agent of n2 does not renew its lease."""
        nonlocal began_s
        began_s = began_s or now_s
        if self._node != "n2" or not self.lease or not 12.0 < now_s - began_s < 20.0:
            real(self, now_s)

    return beat


def _endless(real: Any) -> Any:
    def beat(self: Any, now_s: float) -> None:
        """The lease counts as valid, however long etcd is silent: neither the agent nor its ranks end for it."""
        try:
            real(self, now_s)
        finally:
            self.until_s = now_s + 1e6

    return beat


def _other_of_rank_1(real: Any) -> Any:
    oldest = _oldest(real)
    return lambda self, slot: (oldest if self._at.rank else real)(self, slot)


_P = "mt_resilient."
BUGS = {
    "skip-fsync": Bug(_P + "checkpoint.backend.filesystem", "os.fsync", lambda real: lambda fd: None, POWER, LOST),
    "manifest-first": Bug(_P + "checkpoint.slabs.node_write", "Share.write", _manifest_first, POWER, COMPLETE),
    "stale-slot": Bug(_P + "training.snapshot.snapshots", "Tape._from_slot", _oldest, KILL, STATE),
    "one-rng-for-all": Bug(_P + "training.state.rng", "Randomness.restore", _of_rank_0, KILL, STATE),
    "data-off-by-one": Bug(_P + "training.data.batches", "Batches.go_to", _one_further, KILL, STATE),
    "orphan-left": Bug(_P + "agent.ranks.orphans", "Orphans.end", lambda real: lambda *a, **w: None, KILL, LEFT),
    "checksum-not-verified": Bug(_P + "checkpoint.arena.fill", "arrived", lambda real: lambda *a: None, FLIP, INVENTED),
    "lease-not-renewed": Bug(_P + "agent.peers.lease", "Heartbeat.beat", _for_a_while, KILL, INVENTED, 2, 0, 0.3),
    "no-fencing": Bug(_P + "agent.peers.lease", "Heartbeat.beat", _endless, CUT, AT_ONCE, 1, 1, 1.5),
    "lineage-mixed": Bug(_P + "training.snapshot.snapshots", "Tape._from_slot", _other_of_rank_1, KILL, INVENTED),
}


def plant(name: str) -> None:
    """Swap the function in this process, now or when its module is imported."""
    from mt_resilient.training.attach.import_hook import LoopFinder

    bug = BUGS[name]
    if found := sys.modules.get(bug.module):
        _swap(bug, found)
    else:
        sys.meta_path.insert(0, LoopFinder({bug.module: lambda module: _swap(bug, module)}))


def _swap(bug: Bug, module: ModuleType) -> None:
    marks, reached = Path(os.environ["PLANTED_MARKS"]), False
    *path, name = bug.function.split(".")
    try:
        owner = reduce(getattr, path, module)
        made = bug.made(getattr(owner, name))
    except AttributeError:
        (marks / "gone").write_text(traceback.format_exc())
        os._exit(70)

    def swapped(*args: Any, **words: Any) -> Any:
        nonlocal reached
        if not reached:
            (marks / "executed").touch()
        reached = True
        return made(*args, **words)

    setattr(owner, name, swapped)
