"""The order in which the hooks around a loop of Megatron's shape restore, skip data and create iterators. The session is a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from mt_resilient.resilience.inprocess.tally import Directive
from mt_resilient.training.loops import base
from mt_resilient.training.loops.base import CALCULATOR
from mt_resilient.training.loops.megatron_bridge import wrap as wrap_bridge

from .test_unknown_loops import INLINE, MODERN, loop, told


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
    jumps: Mapping[int, int] = MappingProxyType({})
    restored: Mapping[str, Any] = MappingProxyType({})
    rewound: Mapping[str, Any] | None = None
    made: ClassVar[list[Any]]

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
        self.noted[step] = [*getattr(self.counters.holder, "done", ())]
        return Directive.GO_ON

    def resume(self) -> None: ...

    def finish(self, complete: bool = True) -> None:
        self.noted["complete"] = complete

    def pausing(self, what: str) -> Any:
        return nullcontext()

    def same_randomness(self) -> Any:
        return nullcontext()


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> type[Session]:
    kind = type("One", (Session,), {"made": []})
    monkeypatch.setattr(base, "Boundaries", kind)
    monkeypatch.setitem(sys.modules, CALCULATOR, Ramp())
    return kind


def hooked(source: str = MODERN, **arguments: Any) -> ModuleType:
    module = loop(source)
    vars(module).update(BUILT=[], SAVED=[])
    vars(module.ARGS).update({"consumed_train_samples": 0, "eval_iters": 2, "done": [], **arguments})
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


THEIRS = (
    MODERN.replace(
        "    return iter(range(100)), None, None",
        "    BUILT.append((ARGS.consumed_train_samples, ARGS.iteration, ARGS.eval_iters))\n"
        "    ARGS.eval_iters = [3]\n"
        "    return iter(range(100)), f'validation {len(BUILT)}', None",
    )
    .replace("DONE.append(prefix)", "DONE.append(data_iterator)")
    .replace("return train(", "return after(iterators, train(")
    .replace("ARGS, {}, None)", "ARGS, {}, None))")
    + """
def after(iterators, done):
    evaluate_and_print_results("after", iterators[1])
    save_checkpoint(train_data_iterator=iterators[0])
    return done
def save_checkpoint(train_data_iterator):
    SAVED.append(next(train_data_iterator))
"""
)
"""A loop whose first call of the function for its iterators changes the number of validation steps. After `train`, it evaluates and saves.
"""


def test_a_rank_that_died_after_the_last_step_evaluates_and_saves_with_iterators_of_that_step(
    session: type[Session],
) -> None:
    session.restored = {"iteration": 4, "consumed_train_samples": 24}
    module = hooked(THEIRS)
    assert module.pretrain(None) == 4
    assert module.BUILT == [(0, 0, 2), (16, 3, 2)]
    assert (module.ARGS.consumed_train_samples, module.ARGS.iteration, module.ARGS.eval_iters) == (24, 4, [3])
    assert module.DONE == ["validation 2"]


def test_after_a_restart_the_last_checkpoint_has_the_position_of_the_data(session: type[Session]) -> None:
    session.restored = {"iteration": 2, "consumed_train_samples": 8}
    module = hooked(THEIRS)
    module.pretrain(None)
    assert module.DONE == [0, 1, "validation 2"]
    assert module.SAVED == [2]


def test_a_first_start_uses_the_iterators_that_the_script_has_created() -> None:
    module = hooked(THEIRS)
    module.pretrain(None)
    assert module.DONE == [0, 1, 2, 3, "validation 1"]
    assert module.SAVED == [4]
    assert len(module.BUILT) == 1


def test_a_loop_that_loads_checkpoints_by_itself_is_left_alone(session: type[Session]) -> None:
    module = hooked(perform_rl_step=True)
    assert module.pretrain(None) == 4
    assert session.made == []


@pytest.mark.parametrize(
    ("arguments", "fixed", "put_back"),
    [
        ({}, False, True),
        ({"dataloader_type": "cyclic"}, False, True),
        ({"phase_transition_iterations": [2]}, True, True),
        ({"dataloader_type": "external"}, True, False),
    ],
)
def test_data_is_left_out_only_where_it_follows_from_the_count_of_samples(
    arguments: dict[str, Any], fixed: bool, put_back: bool, session: type[Session]
) -> None:
    hooked(**arguments).pretrain(None)
    (made,) = session.made
    assert (made.fixed_data, made.puts_data_back) == (fixed, put_back)


def test_gathers_that_have_begun_end_before_a_snapshot(session: type[Session]) -> None:
    module = hooked()
    handle = SimpleNamespace(wait=lambda: module.ARGS.done.append("waited"))
    module.MODEL = [SimpleNamespace(bucket_groups=[SimpleNamespace(param_gather_handle=handle)])]
    module.pretrain(None)
    (made,) = session.made
    assert made.noted[1] == ["waited"]


def test_the_loop_s_own_checkpoint_comes_before_a_jump_over_data(session: type[Session]) -> None:
    """Megatron 0.9 saves after the boundary."""
    session.jumps = {3: 1}
    source = INLINE.replace(
        "def save_checkpoint_and_time(iteration):",
        "def save_checkpoint_and_time(iteration):\n    SAVED.append(iteration)",
    )
    module = hooked(source.replace("get_args().begun", "get_args().iteration"), save="there", save_interval=3)
    assert module.pretrain(None) == 4
    assert module.SAVED == [3]
    assert module.ARGS.consumed_train_samples == 4


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
