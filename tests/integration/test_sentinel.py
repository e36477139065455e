"""The ranks' exchange of rows, with real processes: through pages, and through gloo."""

import mmap
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mt_resilient.resilience.board import PAGE_BYTES, Page
from mt_resilient.resilience.boundary import ROW
from mt_resilient.training.sentinel import Exchange, Group, Pages

RANKS, STEPS = 3, 2000


def _talk(exchange: Exchange, rank: int) -> None:
    """Say rows of which each rank has the largest number now and then; take what they make together."""
    chance = random.Random(rank)
    for step in range(STEPS):
        exchange.say([float(step), *(float((step + column) % RANKS == rank) * step for column in range(ROW - 1))])
        if chance.random() < 0.02:
            time.sleep(0.001)
        assert list(exchange.reduced()) == [float(step)] * ROW


def _grouped(rank: int, file: Path) -> Exchange:
    dist.init_process_group("gloo", init_method=file.as_uri(), rank=rank, world_size=RANKS)
    return Group()


@pytest.mark.parametrize("way", ["pages", "group"])
def test_every_rank_takes_the_maximum_of_all(way: str, tmp_path: Path) -> None:
    memory = mmap.mmap(-1, RANKS * PAGE_BYTES)
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                pages = [Page(memoryview(memory)[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]) for n in range(RANKS)]
                _talk(Pages(pages[rank], pages) if way == "pages" else _grouped(rank, tmp_path / "store"), rank)
                code = 0
            except BaseException as error:
                print(error, file=sys.stderr)
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * RANKS
