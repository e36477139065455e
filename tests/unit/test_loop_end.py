"""What the end of a loop leaves behind."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mt_resilient.resilience.model.types import RankPhase
from mt_resilient.training.boundary.boundary import Boundaries


@pytest.mark.parametrize("phase", [RankPhase.TRAINING, RankPhase.STOPPED])
def test_the_threads_that_copy_end_with_a_framework_s_loop(phase: RankPhase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mt_resilient.training.boundary.boundary.unwatch", lambda page, new: setattr(page, "phase", new)
    )
    closed: list[bool] = []
    ended = Boundaries.__new__(Boundaries)
    vars(ended).update(
        _at=object(), _page=SimpleNamespace(phase=phase), _tape=SimpleNamespace(close=lambda: closed.append(True))
    )
    ended.finish()
    assert closed == [True]
    assert ended._page.phase is (RankPhase.STOPPED if phase is RankPhase.STOPPED else RankPhase.FINISHED)
