"""A store whose calls are repeated while etcd does not answer, for an agent that joins: no loop repeats them there, as it does later.

The job's description, tokens and rosters are written by compare-and-swap and read again afterwards, so a repeated write does no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from ...resilience.clock import monotonic_s, sleep
from ...resilience.errors import StoreRefused, StoreUnavailable
from ...resilience.store.protocol import HistoryGone, LeaseGone, Store

AGAIN_S = 0.5
"""Seconds between two calls to an etcd that does not answer."""


def patient(store: Store, wait_s: float, say: Callable[[str, str], None]) -> Store:
    """Return a store that repeats a call without an answer, for at most `wait_s` seconds. say: told once that the agent waits."""
    return cast(Store, _Patient(store, wait_s, say))


class _Patient:
    def __init__(self, store: Store, wait_s: float, say: Callable[[str, str], None]) -> None:
        self._store, self._wait_s, self._say = store, wait_s, say
        self._told = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def repeated(*args: Any, **options: Any) -> Any:
            ends_s = monotonic_s() + self._wait_s
            while True:
                try:
                    return call(*args, **options)
                except (StoreRefused, LeaseGone, HistoryGone):
                    raise
                except StoreUnavailable as error:
                    if monotonic_s() >= ends_s:
                        raise
                    if not self._told:
                        self._told = True
                        self._say(f"{error}. The agent waits for it, for at most {self._wait_s:.0f} s", "warn")
                sleep(AGAIN_S)

        return repeated
