"""One node's access to the job's shared data: the store, the keys, and the node's name."""

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
