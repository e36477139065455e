"""How closely the agent's loop looks, by truth tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mt_resilient.agent.loop import loop_pacing
from mt_resilient.resilience.diagnose.root_cause import HEARD_S
from mt_resilient.resilience.model.generation import RewindOrder
from mt_resilient.resilience.model.signals import InPlaceRewind
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, Step

from .worlds import gone, record, status

NOW_S = 1000.0


@pytest.mark.parametrize("phase", [*Phase])
def test_a_generation_that_does_not_train_is_looked_at_closely(phase: Phase) -> None:
    assert loop_pacing.busy(replace(record(), phase=phase), status(), NOW_S) is (phase not in (Phase.RUN, Phase.LAUNCH))


def test_who_knows_no_generation_looks_closely() -> None:
    assert loop_pacing.busy(None, None, NOW_S)


@pytest.mark.parametrize(("ago_s", "closely"), [(0.0, True), (HEARD_S / 2, True), (HEARD_S, False), (-1.0, False)])
def test_a_rank_that_has_just_ended(ago_s: float, closely: bool) -> None:
    assert loop_pacing.busy(record(), status(exits=(gone(at_s=NOW_S - ago_s),)), NOW_S) is closely


@pytest.mark.parametrize(
    ("ago_s", "replays", "stepped_s", "replayed_s", "tells"),
    [
        (1.0, False, 0.0, 0.0, True),
        (1.0, False, 5.0, 0.0, False),
        (1.0, True, 5.0, 0.0, True),
        (1.0, True, 5.0, 6.0, False),
        (loop_pacing.STARTING_S + 1, True, 0.0, 0.0, False),
    ],
)
def test_a_generation_tells_of_its_start(
    ago_s: float, replays: bool, stepped_s: float, replayed_s: float, tells: bool
) -> None:
    launched = replace(
        record(), launched_s=NOW_S - ago_s, resume_step=Step(10), replay_until=Step(20 if replays else 10)
    )
    assert loop_pacing.starting(launched, status(stepped_s=stepped_s, replayed_s=replayed_s), NOW_S) is tells
    assert loop_pacing.starting(launched, None, NOW_S) is (ago_s < loop_pacing.STARTING_S)


REWIND = RewindOrder(number=3, to=Step(5))
OBEYED = InPlaceRewind(
    generation=Generation(1),
    ordinal=1,
    order=3,
    to=Step(5),
    cause="",
    onset=Step(6),
    reached=Step(8),
    remedy="",
    restore_s=0.1,
    at_s=1.0,
)


def test_orders_until_they_are_obeyed() -> None:
    here = record()
    assert not loop_pacing.ordered(here, None)
    assert not loop_pacing.ordered(here, status())
    assert loop_pacing.ordered(replace(here, rewind=REWIND), status())
    assert not loop_pacing.ordered(replace(here, rewind=REWIND), status(declined=3))
    assert not loop_pacing.ordered(replace(here, rewind=REWIND), status(rewinds=(OBEYED,)))
    assert loop_pacing.ordered(replace(here, paused=True), status())
    assert not loop_pacing.ordered(replace(here, paused=True), status(paused=True))
    assert loop_pacing.ordered(replace(here, snapshot="s1"), status())
    assert loop_pacing.ordered(replace(here, snapshot="s1"), status(snapshot="s1", snapshot_step=Step(7)))
    assert not loop_pacing.ordered(
        replace(here, snapshot="s1"), status(snapshot="s1", snapshot_step=Step(7), durable_steps=(Step(7),))
    )
