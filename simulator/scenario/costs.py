"""The cost of each part of a recovery and of a snapshot: the section `costs` of the configuration. Each default says where it was
measured, or *assumption*. Pure.

"H200" means this program on two H200s of one host, NCCL, ranks forked, 8.46 GB of state per rank, SIGKILL of one rank (docs/limits.md,
*Hardware*). The parts come from a trial with the same state, in which nothing overlapped yet: old worker group gone after 0.7 to 0.9 s,
context after 1.2 to 1.5, first all-reduce after 2.1 to 2.2, state restored after 2.9 to 3.0, first step after 3.06 to 3.07.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from random import Random

from ...resilience.diagnose.root_cause import HEARD_S
from ...resilience.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Only for `simulate`: how long each part of a recovery and of a snapshot takes.      Only the command `simulate` accepts this section
    of the configuration."""

    step_s: float = 6.2
    """Seconds of a step without our overhead. Llama 3 405B with 16 M tokens at 380 TFLOP/s per GPU on 16,384 (arXiv:2407.21783, table 4):
    6 x 405e9 x 16e6 / (16384 x 380e12)."""
    boundary_s: float = 0.0003
    """Seconds of our boundary in each step: 260 to 300 us (docs/scaling.md)."""
    stall_s: float = 0.0045
    """Seconds that a snapshot in memory costs the training: 3.7 ms in the call and 0.3 % of a step of 0.254 s (benchmarks/snapshot.py,
    H200, 7690 MiB a rank)."""
    durable_stall_s: float = 0.03
    """Seconds that a snapshot on disk costs in addition (measured like `stall_s`)."""
    seal_steps: int = 1
    """Steps until a snapshot in memory can be restored: the next step's tally seals it (docs/architecture.md)."""
    copy_s: float = 13.0
    """Seconds from a sealed snapshot to its whole copy in the buddy's memory: 64.5 GB of a node at 5 GB/s (assumption; measured: 0.94 to
    0.99 of a link of 4 Gbit/s)."""
    fetch_s: float = 13.0
    """Seconds to fetch a copy into a node that takes another's place, while its ranks start and build (assumption, as above)."""
    write_s: float = 30.0
    """Seconds until a snapshot is on disk (assumption: shared storage for the whole job; 3.7 s for 7690 MiB on one disk, H200)."""
    news_s: float = 0.1
    """Seconds from an agent's observation to the controller's decision, and again from the decision until the last agent has read it. A
    watch wakes the agent's loop, and a tick must take no longer than this at 10,000 nodes (benchmarks/control_plane.py; two agents: 10
    ms)."""
    asks_per_s: float = 5000.0
    """Writes per second that etcd takes when all nodes answer an order (10,000 acknowledgements in 2.0 s, 3.5.16, two shared cores)."""
    tells_per_s: float = 20_000.0
    """Nodes per second that receive an order (10,000 in 0.5 s)."""
    stop_s: float = 0.9
    """Seconds until all processes of the old worker group have ended and its device memory is free (H200)."""
    start_s: float = 0.6
    """Seconds until the new ranks have started and have a context on the device (H200)."""
    build_s: float = 0.9
    """Seconds of the script's own imports, process groups and model (H200, two ranks)."""
    build_per_rank_s: float = 0.0024
    """Further seconds for each rank of the job: 40 s for 16,384 (assumption; MegaScale, arXiv:2402.15627, section 3.5, has less than 30 s
    for more than 10,000 GPUs, after work on it: 30 s for its 12,288)."""
    restore_s: float = 0.8
    """Seconds to restore state from memory into the live tensors of new processes (H200; most of this time is spent on registering the
    memory again)."""
    read_s: float = 60.0
    """Seconds to restore state from disk (assumption: shared storage; 5.3 s for 7690 MiB from one disk, H200)."""
    first_step_s: float = 0.1
    """Seconds by which the first step takes longer than a usual one (H200)."""
    rewind_s: float = 0.2
    """Seconds of a rewind in place, from memory (0.16 s, H200; and the ranks' reports about it)."""
    jitter_s: float = 0.1
    """Mean of the additional seconds that a node takes for a phase, exponentially distributed (assumption). A phase lasts as long as on the
    slowest node."""
    compare_s: float = 1.0
    """Seconds from a sealed snapshot until its replicas have been compared: the newest one once a second (docs/guarantees.md)."""
    straggler_s: float = 90.0
    """Seconds until a slow node is reported: a minute to learn the baseline, and ten samples of two seconds (docs/configuration.md)."""
    operator_s: float = 3600.0
    """Seconds until an operator takes a broken, quarantined node away, or starts a job again that gave up (assumption)."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < math.inf:
                raise UsageError(f"costs.{field.name} is {getattr(self, field.name)}; it must be 0 or more")
        for name in ("step_s", "asks_per_s", "tells_per_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"costs.{name} is {getattr(self, name)}; it must be more than 0")

    def build_all_s(self, ranks: int) -> float:
        return self.build_s + self.build_per_rank_s * ranks

    def restart_s(self, nodes: int, ranks: int) -> float:
        """Return the seconds of a restart from memory after a rank raised, from the fault to the first step's start, without jitter."""
        control_s = HEARD_S + 4 * self.news_s + 2 * self.told_s(nodes) + self.answered_s(nodes)
        phases_s = self.stop_s + self.start_s + self.build_all_s(ranks) + self.restore_s + self.first_step_s
        return control_s + phases_s

    def told_s(self, nodes: int) -> float:
        """Return the seconds until all nodes have heard of a change of the record."""
        return nodes / self.tells_per_s

    def answered_s(self, nodes: int) -> float:
        """Return the seconds until etcd has taken one write of each node."""
        return nodes / self.asks_per_s

    def slowest_s(self, base_s: float, nodes: int, chance: Random) -> float:
        """Return the seconds of the slowest node in a phase that takes each node `base_s` and its own jitter. The formula is the inverse of
        the distribution of the greatest of `nodes` exponential variables."""
        if not self.jitter_s:
            return base_s
        return base_s - self.jitter_s * math.log(-math.expm1(math.log(1 - chance.random()) / nodes))
