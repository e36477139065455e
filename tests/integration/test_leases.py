"""Ranks whose agent has lost its lease where others would do without them."""

import threading
import time
from pathlib import Path

import pytest

from mt_resilient.resilience.clock import monotonic_ns
from mt_resilient.training.boundary.step_metrics import Figures

from .test_calm_steps import attached

HOUR_NS = 3600 * 10**9


def test_no_boundary_is_crossed_until_the_agent_says_that_it_has_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, page, _ = attached(tmp_path, monkeypatch)
    page.until_ns = monotonic_ns() + HOUR_NS
    session.begin(0)
    session.boundary(1, Figures(1.0, 1.0))
    page.until_ns = 1
    held = threading.Thread(target=session.boundary, args=(2, Figures(1.0, 1.0)), daemon=True)
    held.start()
    time.sleep(0.3)
    assert (held.is_alive(), page.step) == (True, 1)
    page.until_ns = monotonic_ns() + HOUR_NS
    held.join(10)
    assert (held.is_alive(), page.step) == (False, 2)
