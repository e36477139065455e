"""The store, the keys and the name with which one node of a job talks to the others."""

from __future__ import annotations

from dataclasses import dataclass

from ..model.types import NodeId
from .keys import Keys
from .protocol import Store


@dataclass(frozen=True)
class Seat:
    store: Store
    keys: Keys
    """The job's keys."""
    node: NodeId
    """This node's name."""
