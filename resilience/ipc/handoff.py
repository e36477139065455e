"""The data that the agent hands to its ranks: one environment variable in JSON, written at each launch."""

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
    """The figures that a rank reported for a step."""

    step: int
    loss: float
    """NaN: the rank did not know its loss."""
    grad_norm: float


@dataclass(frozen=True, kw_only=True)
class Output:
    """The agent's stdout or stderr, and the files to which ranks print instead (`agent/ranks/rank_output.py`)."""

    device: int
    inode: int
    """`device` and `inode` identify the file behind the agent's stream."""
    paths: tuple[str, ...]
    """For each local rank: the agent's pipe or pseudo-terminal."""


@dataclass(frozen=True, kw_only=True)
class Handoff:
    generation: Generation
    board: str
    """Path of the board, the agent's shared memory: one page per local rank."""
    arena: tuple[tuple[str, ...], ...]
    """For each local rank: the paths of its slots (shared memory for its parts of snapshots)."""
    snapshots: str
    """Address of the directory or object store for the snapshots on disk."""
    unusable: tuple[str, ...] = ()
    """Names of committed snapshots that ranks must not restore, although storage does not show yet that they are set aside."""
    resume_step: Step
    """Step of the snapshot to start from; -1: there is none."""
    resume_course: tuple[int, ...] = ()
    """Generation and number of rewinds of that snapshot; empty: there is none, or `rewind` names it."""
    replay_until: Step
    """Newest step that earlier generations reached; -1: none."""
    reached: tuple[Reached, ...] = ()
    """For each rank of this node: the last step that it reported in the generation before, with the step's loss and gradient norm. Empty
    unless this node's ranks have the same numbers as before, and compute that step again with the same data."""
    origin: str
    """Address of another job's snapshot to start from if `resume_step` is -1; empty: there is none."""
    every_steps: int
    durable_every_steps: int
    reach_steps: int
    """The age in steps that the oldest snapshot in memory should have."""
    policy: RankPolicy
    turns: tuple[Turn, ...]
    """Rewinds in place by ranks of earlier generations."""
    windows: tuple[Window, ...]
    """Batches of data to skip."""
    modules: str
    """File in which local rank 0 lists the script's imports, for the warm process."""
    rewind: RewindOrder | None = None
    """The order to rewind that makes the ranks start from `resume_step`; None: no order does."""
    copies: bool = False
    """Whether snapshots are copied into other nodes' memory."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables, as the script would see them under torchrun alone."""
    agents: tuple[str, ...] = ()
    """Instances of the agents of the first eight nodes. While one of these agents lives, a start is a recovery, not a new command."""
    outputs: tuple[Output, ...] = ()
    stacks: tuple[str, ...] = ()
    """For each local rank: the file into which it writes its stacks on request."""

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: dumps(self).decode()}

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Handoff | None:
        """Return the handoff; None: this process does not run under `mt-resilient run`."""
        text = environ.get(VARIABLE)
        return loads(Handoff, text) if text else None


def local_rank(environ: Mapping[str, str]) -> int:
    """Return a rank's number among its node's ranks; all nodes have equally many ranks. (With `--virtual-local-rank`, each LOCAL_RANK is
    0.)"""
    here = int(environ.get("LOCAL_WORLD_SIZE", 0))
    return int(environ["RANK"]) % here if here else int(environ["LOCAL_RANK"])
