"""Decides which snapshots and which remains of attempts are deleted. Pure: names, figures and a policy in; names and reasons out.

newest `keep`        always stay
protected            stay: the caller needs them, or a person ordered or keeps them
older ones           the first of every `keep_every_steps` stays, unless it is too old, or all that stay are too large together; every
                     other snapshot is deleted
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...resilience.errors import UsageError
from ...resilience.text.formatting import size
from ..arena.slot_header import Stamp
from ..backend.paths import Attempt


def check_numbers(policy: object, least_of: Mapping[str, int], limit: str) -> None:
    """Raise UsageError for a field below its least value in `least_of`, and for a `limit` that is negative, infinite or no number."""
    for name, least in least_of.items():
        if getattr(policy, name) < least:
            raise UsageError(f"snapshots.{name} is {getattr(policy, name)}; it must be at least {least}")
    if not 0 <= getattr(policy, limit) < math.inf:
        raise UsageError(f"snapshots.{limit} is {getattr(policy, limit)}; it is 0 (no limit) or more")


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    keep: int = 3
    """How many of the newest snapshots stay on disk. The snapshot that the current ranks started from and the newest
    certified one stay in addition."""
    keep_every_steps: int = 0
    """From the older snapshots, the first one in every span of this many steps stays too, so that a rewind can go far
    back. 0: none of them stay; 1: all of them."""
    max_age_h: float = 0.0
    """Number of hours after which snapshots that `keep_every_steps` keeps are deleted. 0: never."""
    max_bytes: int = 0
    """While all snapshots on disk together are larger than this many bytes, the oldest of those that `keep_every_steps` keeps are deleted.
    Snapshots that are set aside do not count towards this limit, and need space in addition. 0: no limit."""

    keep_own_h: float = 336.0
    """Number of hours for which a snapshot that a person ordered stays, and for which a snapshot stays that was set aside. The two newest
    of those that are set aside because they are wrong always stay. 0: until a person removes it (`mt-resilient snapshots rm`).
    `mt-resilient snapshots keep` keeps such a snapshot for good.

    Two weeks: a user who ordered it, and was then away for a week, still finds it."""

    def __post_init__(self) -> None:
        check_numbers(self, {"keep": 1, "keep_every_steps": 0, "max_bytes": 0}, limit="max_age_h")
        check_numbers(self, {}, limit="keep_own_h")
        for name in ("max_age_h", "max_bytes"):
            if getattr(self, name) and not self.keep_every_steps:
                raise UsageError(
                    f"snapshots.{name} limits the snapshots older than the newest {self.keep}, and none of them is kept: set "
                    "snapshots.keep_every_steps too (1 keeps all of them)"
                )

    @property
    def weighs(self) -> bool:
        """Whether the policy depends on the snapshots' age and size."""
        return bool(self.max_age_h or self.max_bytes)

    def stays(self, since_s: float | None, now_s: float) -> bool:
        """Whether a snapshot that belongs to the user still stays. since_s: wall-clock seconds when it was ordered or set aside; None: not
        known."""
        return not self.keep_own_h or since_s is None or now_s - since_s <= self.keep_own_h * 3600


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A committed snapshot."""

    attempt: Attempt
    written_s: float | None = None
    """Wall-clock seconds when it was committed. None if unknown: its COMMIT cannot be read, or was not needed."""
    bytes: int | None = None

    @classmethod
    def unknown(cls, attempt: Attempt) -> Stored:
        return cls(attempt=attempt)


class Going(NamedTuple):
    attempt: Attempt
    why: str


def surplus(
    newest_first: Sequence[Stored],
    now_s: float,
    policy: RetentionPolicy,
    protected: frozenset[Attempt] = frozenset(),
) -> list[Going]:
    """Return the committed snapshots to delete, the newest first. The newest snapshot is never deleted. now_s: wall-clock seconds.

    If a snapshot makes the total exceed `max_bytes`, it and all older ones are deleted. No smaller, older snapshot stays in place of a
    newer one.
    """
    every, keep = policy.keep_every_steps, max(policy.keep, 1)
    firsts = {each.attempt.stamp.step // every: each.attempt for each in newest_first} if every else {}
    total_bytes = sum(each.bytes or 0 for each in newest_first[:keep])
    going = []
    for each in newest_first[keep:]:
        why = _why(each, now_s, policy, firsts)
        if not why or each.attempt in protected:
            total_bytes += each.bytes or 0
        if not why and policy.max_bytes and total_bytes > policy.max_bytes:
            why = f"with it, the snapshots would exceed {size(policy.max_bytes)}"
        if why and each.attempt not in protected:
            going.append(Going(each.attempt, why))
    return going


def _why(each: Stored, now_s: float, policy: RetentionPolicy, firsts: dict[int, Attempt]) -> str:
    """Return why this snapshot is deleted, whatever the others' sizes; an empty text if it may stay."""
    every = policy.keep_every_steps
    if not every:
        return f"{policy.keep} newer snapshots exist"
    if firsts[each.attempt.stamp.step // every] != each.attempt:
        return f"an earlier snapshot of the same {every} steps stays"
    if policy.max_age_h and each.written_s is not None and now_s - each.written_s > policy.max_age_h * 3600:
        return f"it is more than {policy.max_age_h:g} h old"
    return ""


def dead(uncommitted: Sequence[Attempt], current: Attempt, held: Collection[Stamp]) -> list[Attempt]:
    """Return the attempts that no node will ever commit. current: the attempt that the committing node is writing. held: the snapshots in
    that node's arena (its ranks' slots).

    All attempts of other runs and of abandoned lineages are dead. In the current lineage, the older attempts that are no longer in the
    arena are dead. An attempt newer than `current` may belong to another node, which is ahead of this one.
    """

    def is_dead(attempt: Attempt) -> bool:
        if attempt.run != current.run or attempt.stamp[:2] < current.stamp[:2]:
            return True
        return attempt.stamp < current.stamp and attempt.stamp not in held

    return [attempt for attempt in uncommitted if is_dead(attempt)]
