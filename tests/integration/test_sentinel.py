"""The ranks' exchange of rows, with real processes: through pages, through gloo, and between nodes with a board each."""

import mmap
import os
import random
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from mt_resilient.resilience.inprocess.tally import ROW
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.training.boundary.allreduce import Exchange, Group, Nodes, Pages
from mt_resilient.training.boundary.cross_node import Rounds

from .. import harness

pytestmark = pytest.mark.timeout(600)  # where one has raised, those that are not connected with it wait for ever
STEPS = 1000
SHAPES = {
    "pages": (3,),
    "group": (3,),
    "two nodes": (1, 2),
    "three nodes": (1, 1, 1),
    "grid": (1, 2, 1, 1),
    "grid with a short row": (1,) * 7,
    "grid with a row of one": (2, 1, 1, 1, 1),
}
"""Ranks of each node."""


def _talk(exchange: Exchange, rank: int, ranks: int, steps: int) -> None:
    """Say rows of which each rank has the largest number now and then; take what they make together."""
    chance = random.Random(rank)
    for step in range(steps):
        exchange.say((float(step), *(float((step + column) % ranks == rank) * step for column in range(ROW - 1))))
        if chance.random() < 0.02:
            time.sleep(0.001)
        assert exchange.reduced() == (float(step),) * ROW


def _exchange(way: str, rank: int, pages: list[Page], file: Path) -> Exchange:
    if way == "pages":
        return Pages(pages[rank], pages)
    shape = SHAPES[way]
    dist.init_process_group("gloo", init_method=file.as_uri(), rank=rank, world_size=sum(shape))
    if way == "group":
        return Group()
    node = next(n for n in range(len(shape)) if rank < sum(shape[: n + 1]))
    first = sum(shape[:node])
    rounds = Rounds(node, len(shape), most_in_one=3) if rank == first else None
    return Nodes(pages[rank], pages[first : first + shape[node]], rounds)


def _rank(rank: int, way: str, there: str, leaves: int) -> None:
    """leaves: this rank goes away in the middle."""
    ranks, place = sum(SHAPES[way]), Path(there)
    with (place / "pages").open("r+b") as file, mmap.mmap(file.fileno(), ranks * PAGE_BYTES) as memory:
        pages = [Page(memoryview(memory)[n * PAGE_BYTES : (n + 1) * PAGE_BYTES]) for n in range(ranks)]
        exchange = _exchange(way, rank, pages, place / "store")
        _talk(exchange, rank, ranks, STEPS // 2 if rank == leaves else STEPS)
        os._exit(9 if rank == leaves else 0)


def _run(way: str, place: Path, leaves: int = -1) -> list[int]:
    """Exit codes by rank."""
    ranks = sum(SHAPES[way])
    (place / "pages").write_bytes(bytes(ranks * PAGE_BYTES))
    return harness.exit_codes(_rank, ranks, way, str(place), leaves)


@pytest.mark.parametrize(
    "way",
    [way if way in ("pages", "grid") else pytest.param(way, marks=pytest.mark.variant) for way in SHAPES],
)
def test_every_rank_takes_the_maximum_of_all(way: str, tmp_path: Path) -> None:
    assert _run(way, tmp_path) == [0] * sum(SHAPES[way])


def test_a_node_that_goes_away_makes_the_others_raise(tmp_path: Path) -> None:
    """Rather than wait: the connection has broken."""
    assert _run("three nodes", tmp_path, leaves=2) == [1, 1, 9]
