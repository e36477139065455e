"""Which snapshots on disk still belong to the lineage, as far as this agent knows where the training went back. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...checkpoint.arena.slot_header import Stamp
from ...checkpoint.backend.paths import Attempt
from .durable_index import Seen


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The training went back, and left steps of its lineage."""

    to: int
    life: tuple[int, int]
    """Numbers of generation and rewinds under which the lineage continues."""
    ordered: bool = False
    """Whether a person ordered to go back, so that the snapshots that were left are good."""
    source: tuple[int, int] | None = None
    """If an order came back to a snapshot of an earlier lineage: the snapshot's numbers of generation and rewinds. Snapshots between these
    numbers and `life` do not belong to the lineage, whatever their step."""

    def left(self, stamp: Stamp) -> bool:
        return stamp.left(self.to, self.life) or (self.source is not None and self.source < stamp[:2] < self.life)

    @property
    def why(self) -> str:
        who = "an order" if self.ordered else "the training"
        what = "came back to a snapshot of step" if self.source else "went back to step"
        return f"{who} {what} {self.to}, and this snapshot does not belong to the lineage any more"


class Cuts:
    def __init__(self) -> None:
        self.made: list[Cut] = []
        self.begins: Stamp | None = None
        """The snapshot, left by an earlier order, from which the present generation begins."""
        self._returned: list[tuple[Stamp, int]] = []
        """Snapshots to which orders came back, and how many of the first cuts no longer apply to them and their predecessors."""
        self._seen_left: dict[str, int] = {}
        """Snapshots that storage showed as set aside by an order, and the number of cuts at that time. Another agent may take them back."""

    def note(self, seen: Seen) -> None:
        """Note which snapshots other agents have taken back. An order came back to them, although no rank of this node has reported it."""
        for _, name in seen.durable:
            attempt = Attempt.parse(name)
            if attempt and name in self._seen_left:
                self._returned.append((attempt.stamp, self._seen_left.pop(name)))
        self._seen_left |= dict.fromkeys(seen.left, len(self.made))

    def returned(self, back: Stamp) -> None:
        """Note that the ranks have come back to this snapshot."""
        self._returned.append((back, len(self.made)))
        self.begins = None

    def of(self, name: str) -> Cut | None:
        """Return how the training left this snapshot's lineage. None: the snapshot still belongs to the lineage."""
        attempt = Attempt.parse(name)
        if attempt is None or (self.begins and precedes(attempt.stamp, self.begins)):
            return None
        past = max((number for back, number in self._returned if precedes(attempt.stamp, back)), default=0)
        return next((cut for cut in self.made[past:] if cut.left(attempt.stamp)), None)


def precedes(stamp: Stamp, back: Stamp) -> bool:
    """Whether `stamp` is `back`, or the same ranks computed it before `back`."""
    return stamp[:2] == back[:2] and stamp.step <= back.step


def before(names: Iterable[str], back: Stamp) -> set[str]:
    """Return the snapshot `back` and its predecessors, if they are among `names`."""
    return {name for name in names if (attempt := Attempt.parse(name)) and precedes(attempt.stamp, back)}
