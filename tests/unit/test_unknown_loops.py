"""Loops of Megatron's shape, and such as are not: whatever a version lacks or calls otherwise, the script runs as without us."""

from __future__ import annotations

import _thread
import importlib
import importlib.machinery
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mt_resilient.training.attach import import_hook
from mt_resilient.training.loops import hooks, megatron_alike, megatron_entry
from mt_resilient.training.loops.base import CALCULATOR
from mt_resilient.training.loops.megatron import BOUNDARY, FLOPS
from mt_resilient.training.loops.megatron_bridge import wrap as wrap_bridge

from ..megatron.known_loops import known

COMMON = """
mpu = object()
def get_args():
    return ARGS
def get_timers():
    return lambda name, log_level=None: None
def build_train_valid_test_data_iterators(provider):
    return iter(range(100)), None, None
def train_step(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config):
    DONE.append(next(data_iterator))
    return {"lm loss": 1.0}, 0, False, False, 0, 1.0, 0
def evaluate_and_print_results(prefix, data_iterator):
    DONE.append(prefix)
def pretrain(provider):
    iterators = build_train_valid_test_data_iterators(provider)
    return train(None, MODEL, OPTIMIZER, SCHEDULER, iterators[0], iterators[1], None, ARGS, {}, None)
"""
MODERN = (
    COMMON
    + """
def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far, context, data):
    return False
def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator, process, config, context, _):
    args, iteration = get_args(), get_args().begun
    while iteration < args.train_iters:
        train_step(forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config)
        iteration += 1
        if checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, 0, context, train_data_iterator):
            break
    return iteration
"""
)
INLINE = (
    COMMON
    + """
def training_log(loss_dict, iteration):
    pass
def save_checkpoint_and_time(iteration):
    pass
def train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator, process, config, context, _):
    args, iteration, num_floating_point_operations_so_far = get_args(), get_args().begun, 0
    while iteration < args.train_iters:
        losses, *_ = train_step(forward_step_func, train_data_iterator, model, optimizer, opt_param_scheduler, config)
        iteration += 1
        num_floating_point_operations_so_far += 1
        training_log(losses, iteration)
        if iteration % 2 == 0:
            evaluate_and_print_results("evaluated", valid_data_iterator)
        if iteration % 3 == 0:
            save_checkpoint_and_time(iteration)
    return iteration
"""
)

USED = (
    "train",
    "train_step",
    "build_train_valid_test_data_iterators",
    "get_args",
    "get_timers",
    "mpu",
    "model",
    "optimizer",
    "opt_param_scheduler",
    "config",
    "train_data_iterator",
    "valid_data_iterator",
)
CASES = [
    *((MODERN, name) for name in (*USED, BOUNDARY, "iteration", FLOPS)),
    *(
        (INLINE, name)
        for name in (
            *USED,
            "training_log",
            "evaluate_and_print_results",
            "save_checkpoint_and_time",
            "iteration",
            FLOPS,
        )
    ),
]
"""A loop, and the name that a version of it calls otherwise."""


@pytest.fixture(autouse=True)
def calculator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(CALCULATOR)
    vars(module).update(update_num_microbatches=lambda *_, **__: None, get_current_global_batch_size=lambda: 1)
    monkeypatch.setitem(sys.modules, CALCULATOR, module)
    return module


def loop(source: str, **names: Any) -> ModuleType:
    """A module with this loop."""
    module = ModuleType("loop")
    model = [torch.nn.Linear(1, 1)]
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    args = SimpleNamespace(
        iteration=0, train_iters=4, exit_interval=None, save=None, save_interval=None, eval_interval=2, do_valid=True
    )
    args.begun = args.num_floating_point_operations_so_far = 0
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    vars(module).update(ARGS=args, DONE=[], MODEL=model, OPTIMIZER=optimizer, SCHEDULER=schedule, **names)
    exec(source, vars(module))
    return module


def told(module: ModuleType) -> list[str]:
    """Why the loop is not known; empty if it is."""
    why: list[str] = []
    megatron_entry.watch(vars(module), lambda _, error: why.append(str(error)))
    return why


def renamed(source: str, name: str) -> str:
    return re.sub(rf"\b{name}\b", f"{name}_of_another_version", source)


@pytest.mark.parametrize("source", [MODERN, INLINE], ids=["modern", "inline"])
def test_a_known_loop_is_hooked_and_runs_to_its_end(source: str) -> None:
    module, plain = loop(source), loop(source)
    plain.pretrain(None)
    assert told(module) == []
    assert module.pretrain(None) == 4
    assert plain.DONE == module.DONE


@pytest.mark.parametrize(
    ("source", "name"), CASES, ids=[f"{'modern' if s is MODERN else 'inline'}-{n}" for s, n in CASES]
)
def test_a_name_that_a_version_calls_otherwise_makes_the_loop_unknown(source: str, name: str) -> None:
    module, plain = loop(renamed(source, name)), loop(renamed(source, name))
    plain.pretrain(None)
    (why,) = told(module)
    assert name in why
    assert module.pretrain(None) == 4
    assert plain.DONE == module.DONE


@pytest.mark.parametrize("source", [MODERN, INLINE], ids=["modern", "inline"])
@pytest.mark.parametrize("name", ["update_num_microbatches", "get_current_global_batch_size", CALCULATOR])
def test_a_calculator_of_another_version_makes_the_loop_unknown(
    source: str, name: str, calculator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == CALCULATOR:
        monkeypatch.delitem(sys.modules, CALCULATOR)
    else:
        delattr(calculator, name)
    module = loop(source)
    assert name in told(module)[0]
    assert module.pretrain(None) == 4


def test_the_import_of_a_module_without_the_expected_names_is_not_disturbed() -> None:
    for name in import_hook.LOOPS:
        module = ModuleType(name)
        import_hook._wrap(module)
        assert not [key for key in vars(module) if key in ("pretrain", "initialize_megatron")]


def test_a_further_interpreter_of_a_process_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the page of its own process, and reset it."""
    monkeypatch.setattr(_thread, "_is_main_interpreter", lambda: False, raising=False)
    monkeypatch.setattr(import_hook, "_attach", pytest.fail)
    monkeypatch.setattr(import_hook.os, "getsid", lambda _: os.getpid())
    before = [*sys.meta_path]
    import_hook.activate()
    assert sys.meta_path == before


def test_a_loader_that_takes_no_attributes_loads_the_loop_unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        __slots__ = ()

        def create_module(self, spec: object) -> None: ...

        def exec_module(self, module: Any) -> None:
            module.value = 7

    spec = importlib.machinery.ModuleSpec("odd_loop", Loader())  # type: ignore[arg-type]
    theirs = SimpleNamespace(find_spec=lambda name, *_: spec if name == "odd_loop" else None)
    ours = import_hook.LoopFinder({"odd_loop": pytest.fail})
    monkeypatch.setattr(sys, "meta_path", [ours, theirs, *sys.meta_path])
    assert importlib.import_module("odd_loop").value == 7
    monkeypatch.delitem(sys.modules, "odd_loop")


@pytest.mark.parametrize("name", ["iteration", "num_floating_point_operations_so_far", "train_iters", "get_args"])
def test_arguments_of_another_version_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known only when `train` is called: then it is called as it stands, and the agent expects no steps any more."""
    page = SimpleNamespace(tells=0)
    monkeypatch.setattr(hooks, "attach", lambda trains: SimpleNamespace(page=page))
    module = loop(MODERN)
    assert told(module) == []
    assert page.tells == 1
    if name == "get_args":
        module.ARGS = SimpleNamespace(**vars(module.ARGS))
        del module.ARGS.num_floating_point_operations_so_far
    else:
        lacks = SimpleNamespace(**vars(module.ARGS))
        delattr(lacks, name)
        loops_own = module.ARGS

        def get_args() -> Any:
            """The hooks ask from elsewhere."""
            return loops_own if sys._getframe(1).f_globals is vars(module) else lacks

        module.get_args = get_args
    assert module.pretrain(None) == 4
    assert page.tells == 0


@pytest.mark.parametrize(
    "result", ["None", "()", "({}, 0)", "{'lm loss': 1.0}", "(None, 0, 0, 0, 0, 1.0)", "({}, 0, 0, 0, 0, 'norm')"]
)
def test_a_step_that_returns_something_else_is_not_judged(result: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = loop(MODERN.replace('return {"lm loss": 1.0}, 0, False, False, 0, 1.0, 0', f"return {result}"))
    assert told(module) == []
    assert module.pretrain(None) == 4
    assert capsys.readouterr().err.count("no loss and no gradient norm is judged") == 1


def bridge(without: str = "") -> ModuleType:
    source = """
def setup_data_iterators(): ...
def setup(): setup_data_iterators()
def train_step(): ...
def checkpoint_and_decide_exit(state): ...
def train(model, optimizer, scheduler, train_data_iterator, valid_data_iterator, global_state): ...
"""
    return loop(renamed(source, without) if without else source)


BRIDGE = [
    "setup",
    "setup_data_iterators",
    "train",
    "train_step",
    BOUNDARY,
    "state",
    "global_state",
    "model",
    "optimizer",
    "scheduler",
]


@pytest.mark.parametrize("name", BRIDGE)
def test_a_bridge_of_another_version_is_left_as_it_is(name: str) -> None:
    module, known = bridge(name), bridge()
    before = dict(vars(module))
    wrap_bridge(module)
    assert {key: value for key, value in vars(module).items() if key in before} == before
    original = known.train
    wrap_bridge(known)
    assert known.train is not original


def test_a_loop_of_the_script_s_own_is_found_by_its_functions() -> None:
    """It has a `pretrain`, `train` and `train_step` of its own, and calls Megatron's `initialize_megatron`."""
    initialize = ModuleType("megatron.training.initialize")
    exec("def initialize_megatron(): return 'initialized'", vars(initialize))
    megatron_alike.wrap(initialize)
    megatron_alike.wrap(initialize)  # a forked rank comes by again
    own = MODERN.replace(
        "def pretrain(provider):", "def pretrain(provider):\n    assert initialize_megatron() == 'initialized'"
    )
    module = loop(own, initialize_megatron=initialize.initialize_megatron)
    original = module.train
    assert module.pretrain(None) == 4
    assert module.train is not original
    other = loop(renamed(own, BOUNDARY), initialize_megatron=initialize.initialize_megatron)
    original = other.train
    assert other.pretrain(None) == 4
    assert other.train is original


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (MODERN, ["yes", f"`{BOUNDARY}`", "`check_grads`"]),
        (INLINE, ["yes", "`training_log`", "`check_grads`"]),
        (renamed(MODERN, BOUNDARY), [f"no: it has neither {BOUNDARY} nor training_log", "", ""]),
        (renamed(MODERN, "train_step"), ["no: it has no train_step", "", ""]),
    ],
    ids=["modern", "inline", "another boundary", "another step"],
)
def test_the_table_of_known_loops_asks_the_sources_of_a_version(
    source: str, expected: list[str], tmp_path: Path
) -> None:
    """Their imports may lack, and their functions are not called."""
    for name, text in {
        "training/training": f"from nowhere import mpu\n{source}\nimport nowhere.at_all\n",
        "core/num_microbatches_calculator": "def update_num_microbatches(): ...\ndef get_current_global_batch_size(): ...\n",
        "core/distributed/param_and_grad_buffer": "class Buckets:\n    def check_grads(self): ...\n",
    }.items():
        path = tmp_path / "megatron" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("mpu = object()", ""))
    assert known(tmp_path) == expected
