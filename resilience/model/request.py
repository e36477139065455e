"""An operator's order, from the wish to the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .types import Step


class Wish(StrEnum):
    """What an operator may ask for."""

    STOP = "stop"
    DRAIN = "drain"
    """Take a snapshot, then leave the node."""
    READMIT = "readmit"
    """A node that is shut out may train again."""
    REWIND = "rewind"
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, kw_only=True)
class Request:
    """An operator's order, put into the store by a command or by the agent that got a signal; it stands until it is answered."""

    kind: str
    """A `Wish`; another program's word is refused, not an error."""
    id: str = ""
    """The key, in the order of time."""
    step: Step = Step(-1)
    """With REWIND: where to,"""
    skip: int = 0
    """and how many batches after it are left out."""
    node: str = ""
    """With DRAIN and READMIT;"""
    instance: str = ""
    """with DRAIN, the agent that is there when it is asked for; empty: none is."""
    snapshot: bool = False
    """With STOP: whether to take a last snapshot first,"""
    budget_s: float = 0.0
    """and how long that may take from `at_s` on, until it is over; 0: as long as the configuration says."""
    exit_code: int = 0
    at_s: float = 0.0
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What has become of a request, for whoever waits for it. Written once."""

    sentence: str
    exit_code: int = 0
    """0: it is done."""
    step: Step = Step(-1)
    """That it was about: restored, on disk, reached."""
