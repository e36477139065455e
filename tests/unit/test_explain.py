"""What is told of an incident claims no more than is known."""

from dataclasses import replace

import pytest

from mt_resilient.resilience.model.rewind import Origin
from mt_resilient.resilience.model.types import Rank
from mt_resilient.resilience.text import verdicts

from .worlds import incident


@pytest.mark.parametrize("ranks", [(), (Rank(1),)])
@pytest.mark.parametrize("origin", [Origin.TRANSIENT, Origin.STATE, Origin.UNDECIDED])
def test_the_origin_of_what_does_not_come_again_is_unknown(origin: Origin, ranks: tuple[Rank, ...]) -> None:
    said = verdicts.concluded(replace(incident(1), origin=origin, ranks=ranks))
    assert "its origin is unknown" in said
    assert "hardware" not in said or said.endswith("is possible)")
    assert ("of rank 1" in said) == (origin is Origin.TRANSIENT and ranks == (Rank(1),))
