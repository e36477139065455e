"""Ranks whose agent has lost its lease where others would do without them."""

import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from mt_resilient.checkpoint.arena import arena
from mt_resilient.resilience.clock import monotonic_ns
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.ipc.handoff import Handoff
from mt_resilient.resilience.model.types import Generation, Step
from mt_resilient.training.attach import attach
from mt_resilient.training.attach.attach import Attachment
from mt_resilient.training.boundary.step_metrics import Figures
from mt_resilient.training.session import Session

HOUR_NS = 3600 * 10**9


def attached(place: Path, monkeypatch: pytest.MonkeyPatch, **sources: Any) -> tuple[Session, Page]:
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
    # A session whose loop does not end leaves both in the process.
    monkeypatch.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)
    monkeypatch.setattr(sys.modules["torch.optim.optimizer"], "_global_optimizer_pre_hooks", OrderedDict())
    session = Session(**(sources or {"model": torch.nn.Linear(2, 2)}))
    weakref.finalize(session, lambda: [*map(os.close, chain(*slots))])
    return session, page


def test_no_boundary_is_crossed_until_the_agent_says_that_it_has_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, page = attached(tmp_path, monkeypatch)
    page.until_ns = monotonic_ns() + HOUR_NS
    session.begin(0)
    session.boundary(1, Figures(1.0, 1.0))
    page.until_ns = 1
    held = threading.Thread(target=session.boundary, args=(2, Figures(1.0, 1.0)), daemon=True)
    held.start()
    time.sleep(0.3)
    assert (held.is_alive(), page.step) == (True, 1)
    page.until_ns = monotonic_ns() + HOUR_NS
    held.join(60)
    assert (held.is_alive(), page.step) == (False, 2)
