"""An agent that joins waits for an etcd that does not answer for a while."""

from typing import Any

import pytest

from mt_resilient.agent.join import patient_store
from mt_resilient.agent.join.patient_store import patient
from mt_resilient.resilience.errors import StoreRefused, StoreUnavailable
from mt_resilient.resilience.store.protocol import LeaseGone

from ..memory_store import MemoryStore


class Silent(MemoryStore):
    """Fails the given number of calls."""

    def __init__(self, calls: int, error: type[Exception] = StoreUnavailable) -> None:
        super().__init__(lambda: 0.0)
        self.calls, self.error = calls, error

    def get(self, key: str) -> Any:
        self.calls -= 1
        if self.calls >= 0:
            raise self.error("etcd did not answer Range")
        return super().get(key)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patient_store, "AGAIN_S", 0.01)


def test_calls_without_an_answer_are_repeated_and_the_user_is_told_once() -> None:
    said = list[str]()
    store = patient(Silent(3), 60.0, lambda sentence, mood: said.append(sentence))
    store.put("a", b"1")
    entry = store.get("a")
    assert entry
    assert entry.value == b"1"
    assert said == ["etcd did not answer Range. The agent waits for it, for at most 60 s"]


def test_it_waits_for_a_limited_time_only() -> None:
    store = patient(Silent(1000), 0.1, lambda sentence, mood: None)
    with pytest.raises(StoreUnavailable):
        store.get("a")


@pytest.mark.parametrize("error", [StoreRefused, LeaseGone])
def test_an_answer_is_an_answer(error: type[Exception]) -> None:
    store = patient(Silent(1, error), 60.0, lambda sentence, mood: None)
    with pytest.raises(error):
        store.get("a")
