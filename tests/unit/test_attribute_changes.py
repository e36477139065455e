"""What a training makes of the attributes of its modules on the way comes back, or is named once: functions that are exchanged, names that
are deleted, objects of other people's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .lives import Life


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


Made = tuple[dict[str, Any], Callable[[int], Any], Callable[[], Any]]
"""What the Session is given, a step, and what there is to be seen."""
AT = 3
"""The step in which something changes."""


def scripts(code: Any) -> Any:
    """What the script makes."""
    return eval(code, {"__name__": "__main__"})


def functions() -> Made:
    model: Any = Net()
    model.act, model.pool, model.made, model.layer = F.relu, F.avg_pool2d, F.relu, nn.Linear
    model.each, model.late = [F.relu], None

    def step(n: int) -> None:
        if n == AT:
            model.act, model.pool, model.made, model.layer = F.gelu, F.max_pool2d, torch.tanh, nn.Tanh
            model.each[0], model.late, model.a.act = torch.sigmoid, max, F.silu

    def looks() -> Any:
        held = (model.act, model.pool, model.made, model.layer, *model.each, model.late, getattr(model.a, "act", None))
        return repr(held)

    return {"model": model}, step, looks


MADE = [functions]


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("kept_at", [AT - 1, AT + 2])
def test_comes_back_in_place_and_in_a_new_process(
    make: Callable[[], Made], kept_at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    given, step, looks = make()
    life = Life(**given)
    life.snapshot()
    for n in range(kept_at):
        step(n)
        life.snapshot()
    kept, expected = life.snapshot(), looks()
    for n in range(kept_at, AT + 4):
        step(n)
        life.snapshot()
    if kept_at < AT:
        assert looks() != expected
    life.restore(kept)
    assert looks() == expected, "in place"
    other, _, seen = make()
    again = Life(**other)
    again.snapshot()
    again.restore(kept)
    assert seen() == expected, "in a new process"
    assert not capfd.readouterr().err


def test_a_function_without_a_name_is_named_once_where_it_is_exchanged(capfd: pytest.CaptureFixture[str]) -> None:
    model: Any = Net()
    remade = compile("lambda x: x + 1", "script", "eval")
    model.act, model.other = scripts("lambda x: x"), scripts("lambda x: x")

    def remake() -> None:
        model.remade = scripts(remade)

    remake()
    life = Life(model=model)
    life.snapshot()
    remake()
    life.snapshot()
    assert not capfd.readouterr().err
    model.act = scripts("lambda x: -x")
    for _ in range(2):
        kept = life.snapshot()
    life.restore(kept)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "model.act is not kept" in lines[0]
    assert "is a function" in lines[0]


def test_one_attribute_for_another_that_was_none_is_told() -> None:
    model: Any = Net()
    model.none = None
    life = Life(model=model)
    life.snapshot()
    del model.none
    model.fresh = 3
    kept = life.snapshot()
    other: Any = Net()
    other.none = None
    Life(model=other).restore(kept)
    assert other.fresh == 3
