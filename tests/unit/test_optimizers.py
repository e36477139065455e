"""Optimizers as sources of state, as far as they are torch's own."""

import pytest
import torch

from mt_resilient.training.optimizers import Optimizers


def test_groups_that_a_restart_will_not_have_are_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    source = Optimizers(optimizer)
    optimizer.add_param_group({"params": [model[1].weight]})  # before the loop: each start does it
    source.collect()
    assert capsys.readouterr().err == ""
    optimizer.add_param_group({"params": [model[1].bias]})
    source.collect()
    assert "a restart cannot go back" in capsys.readouterr().err
    source.collect()
    assert capsys.readouterr().err == ""
