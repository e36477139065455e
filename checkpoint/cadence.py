"""How often the state is kept, and for how long. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..resilience.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    every_steps: int = 1
    """Steps between snapshots in memory: what a fault can cost at most, plus the step it struck in and the one that seals."""
    durable_every_steps: int = 50
    """Steps between snapshots on disk: what losing the whole node can cost. Such a step is kept in memory too."""
    slots: int = 3
    """Snapshots in memory per rank: one sealed, one being staged, one being written to disk."""
    keep: int = 3
    """Snapshots that stay on disk, the newest ones."""

    def __post_init__(self) -> None:
        for name, least in (("every_steps", 1), ("durable_every_steps", 1), ("slots", 3), ("keep", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"snapshots.{name} is {getattr(self, name)}; it must be at least {least}")
