"""An operator's order (such as `stop` or `rewind`): its kind, the request, and the answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .types import Step


class Wish(StrEnum):
    """The orders that an operator can give."""

    STOP = "stop"
    DRAIN = "drain"
    """Take a snapshot, then release the node."""
    READMIT = "readmit"
    """Let a quarantined node train again."""
    REWIND = "rewind"
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True, kw_only=True)
class Request:
    """An operator's order. A command, or an agent that got a signal, writes it into the store. An order stays in force until the controller
    answers it."""

    kind: str
    """A `Wish`. If another program wrote an unknown word, the controller refuses the request and does not fail."""
    id: str = ""
    """The request's key in the store. Ids sort by time."""
    step: Step = Step(-1)
    """With REWIND: the step to rewind to."""
    skip: int = 0
    """With REWIND: number of batches after step `step` to skip."""
    left: str = ""
    """With REWIND: name of a snapshot of step `step` that an earlier order to rewind set aside, and to which the ranks come back. Empty:
    the step of the present lineage."""
    node: str = ""
    """With DRAIN and READMIT: the node."""
    instance: str = ""
    """With DRAIN: the instance of the node's agent when the operator asked; empty: there was no agent."""
    snapshot: bool = False
    """With STOP: whether to take a last snapshot first."""
    budget_s: float = 0.0
    """With STOP and DRAIN: seconds within which the ranks must end; 0: as the configuration says."""
    exit_code: int = 0
    at_s: float = 0.0
    by: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outcome of a request, for the command that waits for it. The controller writes it once."""

    sentence: str
    exit_code: int = 0
    """0: the request was carried out."""
    step: Step = Step(-1)
    """The step that was restored, written to disk, or reached."""
