"""The order in which the hooks around a loop of Megatron's shape restore, skip data and create iterators, seen by a stand-in of the session."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mt_resilient.resilience.inprocess.tally import Directive
from mt_resilient.training.loops import base
from mt_resilient.training.loops.base import CALCULATOR
from mt_resilient.training.loops.megatron_bridge import wrap as wrap_bridge

from .test_unknown_loops import MODERN, loop, told


class Ramp(ModuleType):
    """As Megatron's calculator: batches of 4 samples up to sample 8, then of 8."""

    def __init__(self) -> None:
        super().__init__(CALCULATOR)
        self.size = 4
        self.update_num_microbatches = self.update
        self.get_current_global_batch_size = lambda: self.size

    def update(self, consumed: int, consistency_check: bool = True) -> None:
        self.size = 4 if consumed < 8 else 8


class Session:
    """As Boundaries, for one loop. It notes what the loop's counters are."""

    observes = fixed_data = puts_data_back = False
    cure = ""
    jumps: dict[int, int] = {}
    restored: dict[str, Any] = {}
    rewound: dict[str, Any] | None = None
    made: list[Any] = []

    def __init__(self, counters: Any, **sources: Any) -> None:
        self.counters, self.sources, self.noted, self.rewinds = counters, sources, {}, 0
        self.made.append(self)

    def restore(self) -> int | None:
        self.counters.holder.begun = self.restored.get("iteration", 0)
        self.counters.restore(self.restored)
        return 1 if self.restored else None

    def begin(self, step: int, total: object) -> None:
        self.noted["begin"] = self.counters.collect()
        if self.rewound is not None:
            self.counters.restore(self.rewound)
            self.rewinds += 1

    def jump(self, step: int) -> int:
        return self.jumps.get(step, 0)

    def boundary(self, step: int, figures: Any, **how: Any) -> Directive:
        self.noted[step] = self.counters.collect()
        return Directive.GO_ON

    def resume(self) -> None: ...

    def finish(self, complete: bool = True) -> None:
        self.noted["complete"] = complete

    def pausing(self, what: str) -> Any:
        return nullcontext()


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> type[Session]:
    kind = type("One", (Session,), {"made": []})
    monkeypatch.setattr(base, "Boundaries", kind)
    monkeypatch.setitem(sys.modules, CALCULATOR, Ramp())
    return kind


def hooked(source: str = MODERN, **arguments: Any) -> ModuleType:
    module = loop(source)
    vars(module.ARGS).update({"consumed_train_samples": 0, **arguments})
    assert told(module) == []
    return module


def test_data_left_out_across_a_growing_batch_leaves_the_count_before_it_as_it_was(session: type[Session]) -> None:
    session.restored, session.jumps = {"iteration": 1, "consumed_train_samples": 4}, {1: 3}
    module = hooked()
    module.pretrain(None)
    (made,) = session.made
    assert made.noted["begin"]["consumed_train_samples"] == 4
    assert module.ARGS.consumed_train_samples == 4 + 4 + 8 + 8
    assert sys.modules[CALCULATOR].size == 8


BRIDGE = """
def setup_data_iterators(state):
    BUILT.append(state.train_state.consumed_train_samples)
    return iter(range(100)), None, None
def setup(state):
    return setup_data_iterators(state)
def train_step(): ...
def checkpoint_and_decide_exit(state):
    return False
def train(model, optimizer, scheduler, train_data_iterator, valid_data_iterator, global_state):
    SIZES.append(CALCULATOR.size)
    while global_state.train_state.step < global_state.cfg.train.train_iters:
        global_state.train_state.step += 1
        if checkpoint_and_decide_exit(global_state):
            break
def pretrain(state):
    iterators = setup(state)
    train(MODEL, OPTIMIZER, SCHEDULER, *iterators[:2], state)
"""


def bridge(**names: Any) -> tuple[ModuleType, SimpleNamespace]:
    module = loop(BRIDGE, BUILT=[], SIZES=[], CALCULATOR=sys.modules[CALCULATOR], **names)
    wrap_bridge(module)
    config = SimpleNamespace(
        train=SimpleNamespace(train_iters=4, exit_interval=None, global_batch_size=8),
        checkpoint=SimpleNamespace(save=None, save_interval=None),
        dataset=SimpleNamespace(dataloader_type="single"),
    )
    state = SimpleNamespace(train_state=SimpleNamespace(step=0, consumed_train_samples=0), cfg=config, timers=id)
    return module, state


def test_the_bridge_s_batches_have_the_size_of_the_restored_step(session: type[Session]) -> None:
    """The loop compares the size at its start with that of its first step."""
    session.restored, session.jumps = {"step": 2, "consumed_train_samples": 8}, {2: 1}
    module, state = bridge()
    module.pretrain(state)
    assert module.SIZES == [8]
    session.restored, session.jumps = {"step": 1, "consumed_train_samples": 4}, {1: 1}
    module, state = bridge()
    module.pretrain(state)
    assert state.train_state.consumed_train_samples == 8
    assert [made.noted["begin"]["consumed_train_samples"] for made in session.made] == [8, 4]
