"""What the agent hands to its ranks: one environment variable, JSON, written at each launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..inprocess.tally import RankPolicy
from ..model.data_windows import Window
from ..model.generation import RewindOrder
from ..model.rewind import Turn
from ..model.types import Generation, Step
from ..store.codec import dumps, loads

VARIABLE = "MT_RESILIENT_HANDOFF"


class Reached(NamedTuple):
    """What a rank has said of a step."""

    step: int
    loss: float
    """NaN where it did not know it."""
    grad_norm: float


@dataclass(frozen=True, kw_only=True)
class Handoff:
    generation: Generation
    board: str
    """Path of the board's shared memory: one page per local rank."""
    arena: tuple[tuple[str, ...], ...]
    """Paths of the slots, per local rank."""
    snapshots: str
    """Address of the place that holds the durable snapshots."""
    resume_step: Step
    """State to start from; -1: none."""
    replay_until: Step
    """Step that the generation before had reached; -1: none."""
    reached: tuple[Reached, ...] = ()
    """Per local rank: the last step of the generation before, where the same ranks compute it again."""
    origin: str
    """Address of the snapshot of another job to start from, where `resume_step` is none; empty: of none."""
    every_steps: int
    durable_every_steps: int
    reach_steps: int
    """How old the oldest snapshot in memory is to be."""
    policy: RankPolicy
    turns: tuple[Turn, ...]
    """Rewinds in place that ranks of earlier generations did."""
    windows: tuple[Window, ...]
    """Batches of data that are left out."""
    modules: str
    """File in which local rank 0 notes what the script has imported, for the warm process."""
    rewind: RewindOrder | None = None
    """The order by which they start from `resume_step`."""
    copies: bool = False
    """Snapshots are copied into the memory of other nodes."""
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, as the script would find them under torchrun alone."""
    agents: tuple[str, ...] = ()
    """The instances of the agents of its first eight nodes: while one of them lives, a start is a recovery, and no new command."""
    stacks: tuple[str, ...] = ()
    """Per local rank: where it writes its stacks when it is asked for them."""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: dumps(self).decode()}

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Handoff | None:
        """None outside of `mt-resilient run`."""
        text = environ.get(VARIABLE)
        return loads(Handoff, text) if text else None


def local_rank(environ: Mapping[str, str]) -> int:
    """A rank's number among those of its node; each node has as many. (Under `--virtual-local-rank`, LOCAL_RANK is 0 in all of them.)"""
    here = int(environ.get("LOCAL_WORLD_SIZE", 0))
    return int(environ["RANK"]) % here if here else int(environ["LOCAL_RANK"])
