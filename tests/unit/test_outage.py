"""What an agent does about an etcd that does not answer, or has lost what it knew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.outage import EMPTIED_S, Outage
from mt_resilient.resilience.errors import MachineError, StoreUnavailable
from mt_resilient.resilience.orders import GenerationRecord

from .worlds import record


class Seen:
    """The outage, what was said, and what etcd was told again."""

    def __init__(self, gang: Any = None) -> None:
        self.said: list[str] = []
        self.reminded: list[GenerationRecord] = []
        self.mended = 0
        telling: Any = SimpleNamespace(say=lambda words, mood="info": self.said.append(words))
        node: Any = SimpleNamespace(gang=gang)
        self.outage = Outage(node, telling, self.mend, self.reminded.append)

    def mend(self) -> None:
        self.mended += 1


def gang(generation: int, fenced: bool = False) -> Any:
    return SimpleNamespace(generation=generation, fenced=fenced)


FIFTH, SIXTH = record(number=5), record(number=6)


@pytest.mark.parametrize(("found", "known"), [(None, None), (FIFTH, None), (FIFTH, FIFTH), (SIXTH, FIFTH)])
def test_nothing_is_lost(found: GenerationRecord | None, known: GenerationRecord | None) -> None:
    seen = Seen(gang(5))
    assert seen.outage.looked(found, known, 1.0) is found
    assert (seen.said, seen.reminded) == ([], [])


@pytest.mark.parametrize(
    ("ours", "tells"),
    [(gang(5), True), (gang(5, fenced=True), False), (gang(4), False), (None, False)],
)
def test_who_has_ranks_of_this_generation_tells_an_emptied_etcd(ours: Any, tells: bool) -> None:
    seen = Seen(ours)
    for now_s in (1.0, 2.0):
        assert seen.outage.looked(None, FIFTH, now_s) is FIFTH
    assert seen.reminded == ([FIFTH, FIFTH] if tells else [])
    assert len(seen.said) == 1
    if tells:
        assert seen.outage.looked(None, FIFTH, EMPTIED_S + 2) is FIFTH
    else:
        with pytest.raises(MachineError, match="etcd has lost its data, and nobody trains"):
            seen.outage.looked(None, FIFTH, EMPTIED_S + 2)


def test_who_knows_of_a_later_one_does_not_obey_an_older_one() -> None:
    """It was told again by those who had not heard of the next one yet."""
    seen = Seen()
    assert seen.outage.looked(FIFTH, SIXTH, 1.0) is SIXTH
    with pytest.raises(MachineError):
        seen.outage.looked(FIFTH, SIXTH, EMPTIED_S + 2)


def test_once_it_knows_again_the_time_begins_anew() -> None:
    seen = Seen()
    for turn in range(3):
        seen.outage.looked(None, FIFTH, 1.0 + turn * EMPTIED_S)
        seen.outage.looked(FIFTH, FIFTH, 2.0 + turn * EMPTIED_S)
    assert len(seen.said) == 3


def test_it_is_told_once_and_mended_each_time() -> None:
    seen, away = Seen(), StoreUnavailable("etcd did not answer")
    for now_s in (1.0, 100.0, 101.0):
        seen.outage.lasts(away, now_s)
    seen.outage.over(103.0)
    assert [words.partition(",")[0] for words in seen.said] == [
        "etcd did not answer; training goes on",
        "etcd answers again",
    ]
    assert seen.mended == 3


def test_nobody_is_told_that_training_goes_on_where_it_does_not() -> None:
    seen = Seen()
    seen.outage.lasts(StoreUnavailable("etcd did not answer"), 1.0, fenced_soon=True)
    assert "then its ranks are ended" in seen.said[0]
