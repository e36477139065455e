"""What one node of a job speaks to the others through."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.types import NodeId
from .keys import Keys
from .protocol import Store


@dataclass(frozen=True)
class Seat:
    store: Store
    keys: Keys
    """Of the job."""
    node: NodeId
    """This one's name."""
