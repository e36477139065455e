"""The counters of another project's training loop, as a source of a session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..state.sources import Source


class Counters(Source):
    """Counters in attributes of an object (Megatron's args, Bridge's train state), and counters that the loop keeps in local variables."""

    def __init__(self, holder: Any, names: tuple[str, ...], live: dict[str, Any]) -> None:
        """live: the last known values of the loop's local counters. A restore writes them to `holder`, where the loop reads them when it
        starts."""
        self.holder, self.names, self.live = holder, names, live

    def collect(self) -> dict[str, Any]:
        return {**{name: getattr(self.holder, name) for name in self.names if hasattr(self.holder, name)}, **self.live}

    def settle(self) -> None:
        """Write the loop's local counters to `holder`, so that the loop starts from them when it is called again."""
        self.restore(self.live)

    def restore(self, kept: Mapping[str, Any]) -> None:
        for name, value in list(kept.items()):
            setattr(self.holder, name, value)
            if name in self.live:
                self.live[name] = value
