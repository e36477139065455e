"""Ranks that are silent, as statuses tell of them."""

from __future__ import annotations

from typing import Any

from mt_resilient.resilience.model.signals import Place, RankStall
from mt_resilient.resilience.model.types import Rank, Step

from .worlds import NOW


def stall(rank: int = 0, place: Place = Place.ELSEWHERE, step: int = 10, **fields: Any) -> RankStall:
    """One that has been silent for 70 s, and does not move."""
    story: dict[str, Any] = {
        "silent_s": 70.0,
        "budget_s": 60.0,
        "stage": "step",
        "words": f"at {place}",
        "started": True,
    }
    return RankStall(rank=Rank(rank), at_s=NOW - 70, step=Step(step), place=place, **{**story, **fields})
