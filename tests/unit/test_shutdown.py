"""Who wants to leave waits for the decision that lets him, but not for ever."""

from __future__ import annotations

import signal
from typing import Any

from mt_resilient.agent.loop.shutdown import WAIT_S, Leaving
from mt_resilient.resilience.store.seat import Seat


def leaving() -> Leaving:
    there: Any = None
    return Leaving(Seat(there, there, there), "", False, there, there, there, there)


def test_who_does_not_want_to_leave_waits_for_nothing() -> None:
    stays = leaving()
    assert not stays.in_vain(1.0)
    assert not stays.in_vain(1.0 + 100 * WAIT_S)
    stays.on_signal(signal.SIGINT, None)
    assert not stays.in_vain(200 * WAIT_S)


def test_it_waits_anew_after_each_decision() -> None:
    leaves = leaving()
    leaves.on_signal(signal.SIGINT, None)
    assert not leaves.in_vain(100.0)
    assert not leaves.in_vain(100.0 + WAIT_S)
    leaves.decided()
    assert not leaves.in_vain(101.0 + WAIT_S)
    assert leaves.in_vain(102.0 + 2 * WAIT_S)
