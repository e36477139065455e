"""How often the state is kept, and for how long. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...resilience.errors import UsageError
from ..arena import memory_ring
from .retention import RetentionPolicy

AUTO = 0
"""Steps between snapshots: as `stride` and `durable_interval_s` find them."""

SHARE = 0.01
"""Of the training's time, at most, that snapshots in memory may cost: the issue's bound for a stall."""

MOST_S = (60.0, 1800.0)
"""What a fault may cost at most, whatever the figures say: one that leaves memory intact, and one that does not."""

DEVICE_HOURS_BETWEEN_FAILURES = 50_700.0
"""Llama 3 (arXiv:2407.21783, table 5): 419 unexpected interruptions in 54 days of 16,384 GPUs."""


def stride(cost_s: float, step_s: float) -> int:
    """Steps from one snapshot in memory to the next, so that they cost at most SHARE of the time and a fault at most MOST_S.

    cost_s: what one of them holds the loop up. step_s: a step without it. Both measured; as long as they are not, every step.
    """
    if cost_s <= 0 or step_s <= 0:
        return 1
    return max(1, min(math.ceil(cost_s / (SHARE * step_s)), int(MOST_S[0] / step_s)))


def durable_interval_s(save_s: float, devices: int, failures: int, uptime_s: float) -> float:
    """Seconds from one snapshot on disk to the next: √(2 · cost · time between failures) (Young, CACM 17(9), 1974; Daly, FGCS 22, 2006,
    has the same as its leading term), no more than MOST_S and no less than twice what a save takes.

    save_s: seconds that the last save took; taken as its cost, which it is where it holds the training up (here it hardly does). The
    failure rate is what was seen (`failures` in `uptime_s`), and one failure in DEVICE_HOURS_BETWEEN_FAILURES of each of `devices`, so
    that a quiet hour does not pass for safety.
    """
    prior_s = DEVICE_HOURS_BETWEEN_FAILURES * 3600 / max(devices, 1)
    between_s = (prior_s + uptime_s) / (1 + failures)
    return max(2 * save_s, min(math.sqrt(2 * save_s * between_s), MOST_S[1]))


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy(RetentionPolicy):
    every_steps: int = AUTO
    """Steps between snapshots in memory: what a fault can cost at most, plus the step it struck in and those that seal. 0: as many as
    keep their cost below 1 % of the time, and a minute."""
    durable_every_steps: int = AUTO
    """Steps between snapshots on disk: what losing the whole node can cost. Such a step is kept in memory too. 0: by the time a save takes
    and the failures that are seen and known, at most half an hour."""
    slots: int = memory_ring.AT_WORK
    """Snapshots in memory per rank: one sealed, one being staged, one being written to disk; each further one keeps an older snapshot,
    two of them one that is `reach_steps` old, and those beyond fill the ages between."""
    reach_steps: int = memory_ring.REACH_STEPS
    """With at least five `slots`: how many steps back one can go in memory at least; the oldest is at most twice as old, and a snapshot's
    interval. With four it is up to so old; with three there are the newest ones only."""
    max_write_mb_per_s: float = 0.0
    """Limit of this node's stream of snapshots to disk, in 10^6 bytes a second; 0 for none."""
    endpoint: str = ""
    """http(s)://host:port of the S3 server, for --snapshots s3://…; empty: that of AWS."""
    region: str = ""
    """Of the bucket; empty: as the server says."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least_of = {"every_steps": AUTO, "durable_every_steps": AUTO, "slots": memory_ring.AT_WORK, "reach_steps": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise UsageError(f"snapshots.{name} is {getattr(self, name)}; it must be at least {least}")
        if not 0 <= self.max_write_mb_per_s < float("inf"):
            raise UsageError(f"snapshots.max_write_mb_per_s is {self.max_write_mb_per_s}; it is 0 (no limit) or more")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise UsageError(f"snapshots.endpoint is {self.endpoint}; it starts with http:// or https://")


@dataclass(frozen=True, kw_only=True)
class CopiesPolicy:
    every_s: float = 30.0
    """Where several nodes train: from one snapshot that all of them copy into another node's memory to the next, or twice what a copy
    takes, if that is longer: what losing a node can cost. It takes memory for four more snapshots of each rank. 0: none is copied."""
    stall_s: float = 10.0
    """When nothing moves for so long, the other node counts as lost, as far as copies go."""
    hold_s: float = 60.0
    """What a copy may take at most: its slots are held meanwhile, so that a rank may have to leave snapshots out."""

    def __post_init__(self) -> None:
        if self.every_s < 0 or min(self.stall_s, self.hold_s) <= 0:
            raise UsageError(
                "copies.every_s cannot be negative, and copies.stall_s and copies.hold_s have to be positive"
            )

    def interval_s(self, took_s: float) -> float:
        """From one snapshot that is asked for another node's memory to the next, if the last copy took so long; 0: none is. A copy holds
        slots, which ranks may lack for their next snapshots, and the network, which is the ranks' own: half of the time both are free."""
        return max(self.every_s, 2 * took_s) if self.every_s else 0.0
