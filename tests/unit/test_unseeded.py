"""Generators that were made without a seed go on with another one in each process that is forked; those that have one do not."""

import random
from typing import Any

import numpy as np

from mt_resilient.training.warm import unseeded


class Own(random.Random):
    pass


def test_generators_that_were_created_without_a_seed_are_seeded_again() -> None:
    before = random.Random()
    with unseeded.noted():
        drawn = [random.Random(), Own(None), np.random.default_rng(), np.random.RandomState()]
        seeded = [random.Random(3), Own("a"), np.random.default_rng(3), np.random.RandomState(3), random.Random()]
        seeded[-1].seed(5)  # type: ignore[union-attr]

    def state(generator: Any) -> str:
        if isinstance(generator, random.Random):
            return str(generator.getstate())
        return str(
            generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state
        )

    kept, first = [*map(state, (before, *seeded))], [*map(state, drawn)]
    unseeded.draw_anew()
    assert [*map(state, (before, *seeded))] == kept
    assert all(now != was for now, was in zip(map(state, drawn), first, strict=True))
    assert random.Random.seed.__qualname__ == "Random.seed"
