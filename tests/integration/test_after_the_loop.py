"""After its loop, a Session leaves nothing in the process that keeps a model alive, or an optimizer of a later training."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from .test_leases import attached

GOT = DataLoader._get_iterator


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: Any) -> None:
    optimizer.zero_grad()
    model(given).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("leaves", [False, True], ids=["to its end", "left early"])
def test_what_a_training_used_is_let_go(leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    session, _ = attached(tmp_path, monkeypatch, model=model, optimizer=optimizer)
    loader = DataLoader(torch.ones(4, 2).unbind(), batch_size=2)  # type: ignore[arg-type]
    assert DataLoader._get_iterator is not GOT
    for step, batch in session.batches(loader, 2):
        trained(model, optimizer, batch)
        session.report(loss=0.5)
        if leaves and step == 1:
            break
    gone = [weakref.ref(each) for each in (model.weight, loader, session)]
    del model, optimizer, session, loader
    assert DataLoader._get_iterator is GOT
    for _ in range(2):
        later = torch.nn.Linear(2, 2)
        trained(later, torch.optim.Adam(later.parameters()), torch.ones(1, 2))
        gone.append(weakref.ref(later.weight))
        del later
    gc.collect()
    assert [each() for each in gone] == [None] * 5
