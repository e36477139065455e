"""A counter that workers share with their rank is told when it moves on with their batches: read ahead, it is of no certain one."""

from __future__ import annotations

from multiprocessing import Value
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from mt_resilient.training.data.worker_rng import Beginning, Telling


class Counting:
    """As the mask collator of I-JEPA."""

    def __init__(self) -> None:
        self.count: Any = Value("i", 0)
        self.still, self.cache = torch.zeros(2).share_memory_(), torch.zeros(999).share_memory_()

    def __call__(self, samples: Any) -> Any:
        self.cache[samples[0]] = 1.0
        self.count.value += 1
        return self.count.value


class Rows:
    def __init__(self) -> None:
        self.read: Any = Value("i", 0)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        self.read.value += 1
        return row


def told(stays: bool, collate: Any) -> list[str]:
    beginning = Beginning()
    beginning.collate, beginning.stays = collate, stays
    loader: Any = DataLoader(
        Rows(),  # type: ignore[arg-type]
        batch_size=1,
        num_workers=1,
        persistent_workers=stays,
        collate_fn=Telling(collate, stays),
        worker_init_fn=beginning,
    )
    return sorted({name for _ in range(2) for made in loader for name in made.generators.lost})


@pytest.mark.parametrize("stays", [False, True])
def test_a_counter_that_moves_on_is_told_and_a_cache_is_not(stays: bool) -> None:
    found = told(stays, Counting())
    assert "collate.count" in found
    assert not {"collate.still", "collate.cache"} & {*found}


def test_what_moves_between_two_batches_may_be_the_ranks_own_where_workers_stay() -> None:
    assert (told(False, list), told(True, list)) == (["dataset.read"], [])
