"""Drawn states come back after a SIGKILL of a rank, a NaN and a SIGKILL of the agent, or are refused before the first step. Hundreds of
them: tests/chaos/campaign.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from .campaign import play
from .drawn import ROWS, WRITTEN


@pytest.mark.variant
def test_what_is_drawn_comes_back(tmp_path: Path) -> None:
    came = play(0, 30, tmp_path)
    assert not came.failed, came.failed
    assert not came.silent, sorted(came.silent)
    assert len(came.equal) == 30


@pytest.mark.variant
def test_what_nobody_draws_comes_back(tmp_path: Path) -> None:
    came = play(WRITTEN, WRITTEN + len(ROWS), tmp_path)
    assert not came.failed, came.failed
    assert (came.silent, came.refused) == (set(), {}), [row.__name__ for row in ROWS]


@pytest.mark.variant
def test_what_cannot_be_kept_ends_the_job_at_its_first_start(tmp_path: Path) -> None:
    (refused,) = play(243, 244, tmp_path).refused.values()
    assert "mapping['odd'][0] can't be saved" in refused
