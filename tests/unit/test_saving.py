"""Who asks the ranks for a snapshot on disk, and when."""

from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.snapshots import saving
from mt_resilient.agent.snapshots.saving import FIRST_S, Saving
from mt_resilient.checkpoint.durable.save_interval import SnapshotPolicy


@pytest.mark.parametrize(
    ("seat", "short", "asked"),
    [((0, 1), False, 1), ((0, 2), False, 1), ((1, 2), False, 0), ((1, 2), True, 3)],
    ids=["the only node", "the first node", "another node", "another node that is short of memory"],
)
def test_the_first_node_asks_on_behalf_of_all(
    seat: tuple[int, int], short: bool, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other nodes never hear how long a snapshot takes, so their schedules would ask every minute."""
    now_s, asks = [1000.0], list[float]()
    monkeypatch.setattr(saving, "monotonic_s", lambda: now_s[0])
    board: Any = SimpleNamespace(pages=[None], ask_durable=lambda: asks.append(now_s[0]))
    found = Saving(board, SimpleNamespace(), None, SnapshotPolicy())  # type: ignore[arg-type]
    for _ in range(3):
        now_s[0] += FIRST_S / 2
        found.pace(seat, short=short)
    assert len(asks) == asked
