"""What it costs to look through a state between two steps, before a byte of it is copied: CPU time; two versions in turn, in one process.

    python benchmarks/walks.py [--tensors N] [--turns N] [--against CHECKOUT]

A mapping of 100,000 small tensors: the first look, and one at a state of the same form. And a model of 2,000 parameters with its AdamW, at
a boundary. `--against` takes the program of another checkout as the peer.

Predicted for the next look at the mapping: 0.1 s. Not reached: on two cores with a load of 20, 0.40 s, and 0.44 s by the program before
it. It is linear: each tensor is asked for what it is and where it lies (eight questions), and for how it is laid out (four). Torch takes
70 to 150 ns for an answer. Fewer questions would have to trust that a tensor that is still the same object is still as it was; `.data`,
`set_` and `resize_` break that.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Result, program, report

ROOT = Path(__file__).resolve().parent.parent
LAYERS = 1000
FIRST_S, NEXT_S = 1.0, 0.1


def mapping(tensors: int) -> dict[str, Any]:
    return {"state": {f"key {number}": torch.zeros(2) for number in range(tensors)}}


def training() -> dict[str, Any]:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def look(of: Callable[[str], Any], given: dict[str, Any]) -> Callable[[], object]:
    """Return a function that plans a snapshot as its first phase does, with the program whose modules `of` imports."""
    sources = of("training.state.sources").sources_of(given)
    stager = of("checkpoint.arena.staging").Stager()
    return lambda: stager.plan({name: source.collect() for name, source in sources.items()}, torch.is_tensor)


def timed(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def rows(name: str, took: dict[str, list[float]], limit: float | None, unit: str = "s") -> list[Result]:
    found = []
    for what, of in (("median", statistics.median), ("mean", statistics.fmean)):
        by = {way: of(each) for way, each in took.items()}
        target = None if limit is None else f"at most {limit} s"
        found.append(
            Result(name=f"{name}, {what}", ours=by["ours"], peer=by.get("peer"), limit=limit, unit=unit, target=target)
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--against", type=Path, help="root of another checkout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    roots = {"ours": ROOT} | ({"peer": options.against.resolve()} if options.against else {})
    ways = {name: program(f"mt_{name}", root) for name, root in roots.items()}
    gc.disable()  # as `snapshot_pace.uncollected` does
    results = []
    for name, given, limits in (
        (f"a mapping of {options.tensors} tensors", mapping(options.tensors), (FIRST_S, NEXT_S)),
        (f"a model of {2 * LAYERS} parameters and its AdamW", training(), (None, None)),
    ):
        looks = {way: look(of, given) for way, of in ways.items()}
        first = {way: [timed(each)] for way, each in looks.items()}
        again: dict[str, list[float]] = {way: [] for way in looks}
        for turn in range(options.turns):
            for way in list(looks) if turn % 2 else reversed(looks):
                again[way].append(timed(looks[way]))
        results += rows(f"{name}: the first look", first, limits[0])[:1]
        results += rows(f"{name}: the next one", again, limits[1])
    report("walks", results, against=str(options.against or "nothing"))


if __name__ == "__main__":
    main()
