"""A step that says nothing new is not judged anew: a session that takes this way ends where one ends that judges each step in full.

(Which judgements may stand for the next step is `Judgement.calm`'s to say, of which `tests/unit/test_tally.py` has a table: here most of
the others are followed by one that is made in full.)
"""

import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mt_resilient.checkpoint.arena import arena
from mt_resilient.resilience.inprocess.tally import Directive, RankPolicy
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.resilience.model.types import Generation, Order, Step
from mt_resilient.training.attach import attach
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.boundary.consensus import Incurable
from mt_resilient.training.boundary.step_metrics import Figures
from mt_resilient.training.session import Session

pytestmark = pytest.mark.timing

STEPS = 800


def attached(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Session, Page, list[list[int]]]:
    """A session of one rank, over a page and slots of its own."""
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    page.clear(1, 0)
    page.pid = os.getpid()
    slots = arena.create(1, 3)
    handoff = Handoff(
        generation=Generation(1),
        board="",
        arena=tuple(map(tuple, arena.paths(slots, os.getpid()))),
        snapshots=str(place),
        resume_step=Step(-1),
        replay_until=Step(-1),
        origin="",
        every_steps=7,
        durable_every_steps=10**9,
        reach_steps=100,
        policy=RankPolicy(),
        turns=(),
        windows=(),
        modules=str(place / "modules"),
    )
    at = Attachment(handoff=handoff, page=page, rank=0, local_rank=0, world=1)
    monkeypatch.setitem(attach._attached, os.getpid(), at)
    return Session(model=torch.nn.Linear(2, 2)), page, slots


def story(session: Session, page: Page, seed: int, in_full: bool) -> list[Any]:
    """What a training comes to that meets with everything: spikes, NaN, figures that nobody knows, orders."""
    chance, told = random.Random(seed), []
    step, council = session.begin(0), session._council
    assert council
    until = 0
    while step < STEPS:
        step += 1
        luck = chance.random()
        if luck < 0.005:
            until = step + 3
        high = 10.0 if step <= until else 0.0
        figures = Figures(2 + high + 0.05 * chance.gauss(0, 1), 1e4 if luck > 0.995 else 1 + abs(chance.gauss(0, 1)))
        if 0.02 < luck < 0.022:  # rarely: after that, as many steps as a baseline has are judged in full
            figures = chance.choice([Figures(), Figures(math.nan, 1.0), Figures(math.inf, math.inf, skipped=True)])
        if luck > 0.98:
            page.durable += 1
        if luck < 0.002:
            page.order = Order.STOP
        session.fixed_data = chance.random() < 0.5 if luck > 0.97 else session.fixed_data
        if in_full:
            council._calm = None
        try:
            directive = session.boundary(step, figures)
        except Incurable as error:
            told.append(str(error))
            break
        page.order = Order.NONE
        told.append((directive, council.stride, session._tape.held, session._tape.owed, council.paused))
        if directive is Directive.REWIND:
            step, until = session.rewind(), 0
            session.resume()
    kept = session._course.collect()
    told += [
        *session._course.figures,
        *session._course.turns,
        kept["windows"],
        page.rewinds,
        page.snapshots,
        page.skipped,
    ]
    return [*told, kept["figures"].nan_to_num(-7).tolist()]


@pytest.mark.parametrize("seed", range(6))
def test_both_ways_come_to_the_same(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stories = []
    for in_full in (True, False):
        session, page, slots = attached(tmp_path, monkeypatch)
        try:
            stories.append(story(session, page, seed, in_full))
        finally:
            for slot in slots[0]:
                os.close(slot)
    assert stories[0] == stories[1]
    directives = {each[0] for each in stories[0] if isinstance(each, tuple)}
    assert {Directive.GO_ON, Directive.REWIND} <= directives


def test_most_steps_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _, slots = attached(tmp_path, monkeypatch)
    course, taken = session._course, 0
    passes = course.passes

    def counted(*figures: float) -> bool:
        nonlocal taken
        taken += (answer := passes(*figures))
        return answer

    monkeypatch.setattr(course, "passes", counted)
    session.begin(0)
    for step in range(1, STEPS + 1):
        session.boundary(step, Figures(2 + 0.01 * (step % 7), 1.0))
    for slot in slots[0]:
        os.close(slot)
    assert taken > 0.8 * (STEPS - 132), (
        "one in seven has a snapshot behind it, and the first ones have nothing to be compared with"
    )
