"""How often snapshots are taken, and for how long they are kept. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...resilience.errors import UsageError
from ..arena import memory_ring
from .retention import RetentionPolicy, check_numbers

AUTO = 0
"""As a number of steps between snapshots, this value means that `stride` and `durable_interval_s` compute the interval."""

SHARE = 0.006
"""The largest share of the training's time that snapshots in memory may cost. The project's requirements allow 1 % for all costs. On two
H200s, steps take 0.3 % longer also without snapshots (benchmarks/overhead.py --device cuda)."""

MOST_S = (60.0, 1800.0)
"""The most seconds of training that one fault may cost, whatever the measured figures say. The first is for a fault after which memory is
intact, the second for any other."""

DEVICE_HOURS_BETWEEN_FAILURES = 50_700.0
"""Mean device hours between two failures. Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions in 54 days of 16,384 GPUs."""


def stride(cost_s: float, step_s: float) -> int:
    """Return the number of steps between two snapshots in memory. Snapshots then cost at most SHARE of the time, and a fault costs at most
    MOST_S[0].

    cost_s: seconds by which one snapshot delays the loop. step_s: seconds of a step without a snapshot. Both durations are measured; until
    they are known, every step has a snapshot.
    """
    if cost_s <= 0 or step_s <= 0:
        return 1
    return max(1, min(math.ceil(cost_s / (SHARE * step_s)), int(MOST_S[0] / step_s)))


def durable_interval_s(save_s: float, devices: int, failures: int, uptime_s: float) -> float:
    """Return the seconds between two snapshots on disk: √(2 · cost · time between failures) (Young, CACM 17(9), 1974; Daly, FGCS 22, 2006,
    has the same leading term). The result is at most MOST_S[1], but never less than twice the duration of a save.

    save_s: seconds that the last save took. The formula takes these seconds as the cost of a save, though a save hardly delays the training
    here. The failure rate combines the observed failures (`failures` in `uptime_s`) with one failure in DEVICE_HOURS_BETWEEN_FAILURES of
    each of `devices`. So an hour without failures does not count as proof of safety.
    """
    prior_s = DEVICE_HOURS_BETWEEN_FAILURES * 3600 / max(devices, 1)
    between_s = (prior_s + uptime_s) / (1 + failures)
    return max(2 * save_s, min(math.sqrt(2 * save_s * between_s), MOST_S[1]))


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy(RetentionPolicy):
    """Snapshots in memory and on disk: how often, how many, and for how long."""

    every_steps: int = AUTO
    """Steps between snapshots in memory. A fault costs at most this many steps, plus the step that it strikes and the steps until a
    snapshot is sealed. 0: as often as the measured cost stays below 0.6 % of the time, and at least once a minute. Short:
    `--snapshot-every`."""
    durable_every_steps: int = AUTO
    """Steps between snapshots on disk. The loss of the agent or of the machine costs at most this many steps. A step with a snapshot on
    disk has a snapshot in memory too. 0: the interval of Young and Daly, from the measured time of a save and the rate of failures. With 0,
    the first snapshot on disk comes after a minute, and further ones come at least every half hour. Short: `--durable-every`."""
    slots: int = memory_ring.AT_WORK
    """Snapshots in memory per rank, at least 3. Each snapshot is as large as the rank's state. Three are needed: one sealed, one being
    staged, one being written to disk. A 4th and a 5th slot keep older snapshots. Further slots keep snapshots of ages in between."""
    reach_steps: int = memory_ring.REACH_STEPS
    """With 5 slots or more, the memory reaches at least this many steps back. The oldest snapshot is at most twice as old, plus one
    snapshot interval. With 4 slots the memory reaches up to this far; with 3 it holds only the newest snapshots."""
    max_write_mb_per_s: float = 0.0
    """Limit of a node's stream of snapshots to disk, in 10⁶ bytes per second. 0: no limit."""
    endpoint: str = ""
    """`http(s)://host:port` of the S3 server, for `--snapshots s3://…`. Empty: AWS."""
    region: str = ""
    """Region of the bucket. Empty: the server names it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least_of = {"every_steps": AUTO, "durable_every_steps": AUTO, "slots": memory_ring.AT_WORK, "reach_steps": 1}
        check_numbers(self, least_of, limit="max_write_mb_per_s")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise UsageError(f"snapshots.endpoint is {self.endpoint}; it starts with http:// or https://")


@dataclass(frozen=True, kw_only=True)
class CopiesPolicy:
    """Copies of snapshots in another node's memory, when several nodes train."""

    every_s: float = 30.0
    """Seconds between snapshots that every node copies into another node's memory. If twice the duration of a copy is longer, it is the
    interval. The loss of a node costs at most the steps since the last copy. The copies take memory for four more snapshots of each rank:
    two in its own node, and two in another node. 0: no copies; the loss of a node then costs the steps since the last snapshot on disk."""
    stall_s: float = 10.0
    """A copy that moves no bytes for this long is given up."""
    hold_s: float = 60.0
    """A copy that takes longer than this is given up.

    A running copy holds its slots, so a rank may have to skip snapshots."""

    def __post_init__(self) -> None:
        if self.every_s < 0 or min(self.stall_s, self.hold_s) <= 0:
            raise UsageError(
                "copies.every_s cannot be negative, and copies.stall_s and copies.hold_s have to be positive"
            )

    def interval_s(self, took_s: float) -> float:
        """Return the seconds between two snapshots that are copied into another node's memory. 0: no snapshot is copied. took_s: seconds
        that the last copy took. A copy locks slots that ranks may need for their next snapshots, and uses the ranks' network. So slots and
        network are free of copies for at least half of the time."""
        return max(self.every_s, 2 * took_s) if self.every_s else 0.0
