"""What DeepSpeed ZeRO-3 has partitioned is refused by name; empty groups of others, and what is not watched, are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mt_resilient.training.state.partitioned import Partitioned
from mt_resilient.training.state.sources import sources_of


def wrapper(package: str, groups: list[dict[str, Any]]) -> Any:
    """A wrapper around an optimizer, of a class of this package."""
    made = type("Wrapper", (), {"__module__": f"{package}.optimizer"})()
    made.optimizer = torch.optim.SGD([{"params": []}])
    made.optimizer.param_groups[:] = groups
    made.param_groups = made.optimizer.param_groups
    return made


def model(partitioned: bool) -> nn.Module:
    made = nn.Linear(1, 1)
    if partitioned:
        made.weight.ds_tensor = made.weight.data
    return made


@pytest.mark.parametrize(
    ("things", "named"),
    [
        ({"net": model(True)}, "net"),
        ({"net": model(False), "opt": wrapper("deepspeed", [{"params": []}])}, "opt"),
        ({"net": model(False), "opt": wrapper("deepspeed", [{"params": [nn.Parameter(torch.ones(1))]}])}, ""),
        ({"net": model(False), "opt": wrapper("megatron", [{"params": []}])}, ""),
        ({"net": model(False), "opt": torch.optim.SGD([{"params": []}])}, ""),
    ],
)
def test_what_is_refused(things: dict[str, Any], named: str) -> None:
    assert {*sources_of(things, look_through=False)} == {*things}
    if named:
        with pytest.raises(Partitioned, match=f"^{named} is partitioned by DeepSpeed ZeRO-3"):
            sources_of(things)
    else:
        assert {*sources_of(things)} == {*things}
