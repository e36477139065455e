"""What is wrong with the simulated world."""

from __future__ import annotations

from dataclasses import dataclass, field

from mt_resilient.checkpoint.arena.slot_header import Stamp
from mt_resilient.resilience.model.types import NodeId


@dataclass
class Cut:
    """Nodes that some of the network is gone for."""

    etcd: set[NodeId] = field(default_factory=set)
    """They do not reach the store,"""
    peers: set[NodeId] = field(default_factory=set)
    """nor other nodes' ranks."""


@dataclass
class Faults:
    """Episodes set it."""

    import_error: str = ""
    unknown: bool = False
    """The script's loop is none that is known: its ranks report nothing."""
    nan_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times it will give NaN."""
    nan_batches: set[int] = field(default_factory=set)
    """Samples that give NaN whenever they are used,"""
    spike_batches: set[int] = field(default_factory=set)
    """and those that let the loss go up: it stays there while the state has used one."""
    hard_steps: set[int] = field(default_factory=set)
    """Steps with a high loss that leaves no trace in the state."""
    odd: bool = False
    """While the loss is high, rank 1's own gradient is out of line."""
    spike_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times the state will be damaged there, so that the loss goes up."""
    fixed_data: bool = False
    """The script takes its batches by itself: its data is not known, and none can be left out."""
    kill_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times rank 1 will be killed right after it."""
    flip_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times a bit of rank 1's copy will flip right after it. What is computed from it then is wrong on all ranks."""
    torn: set[int] = field(default_factory=set)
    """Steps whose snapshot on disk cannot be read."""
    hang_at: dict[int, int] = field(default_factory=dict)
    """Step → how many times rank 1 will hang right after it."""
    busy_at: dict[int, int] = field(default_factory=dict)
    """Step → how many seconds rank 1 will compute after it."""
    refused: frozenset[int] = frozenset()
    """Numbers of nodes on which the script raises as soon as it starts."""
    hangs_at_start: int = 0
    """How many lives of the ranks begin with a hang of rank 1, before its first step."""
    hangs_in_teardown: bool = False
    teardown_s: int = 0
    """How long the ranks take to end when their loop is over."""
    miss_at: dict[int, frozenset[int]] = field(default_factory=dict)
    """Step → the ranks that will find no slot for their copy, once."""
    rot: set[int] = field(default_factory=set)
    """Steps whose snapshot in memory is damaged when it is read."""
    lists_late: dict[NodeId, tuple[float, dict[int, Stamp]]] = field(default_factory=dict)
    """Nodes whose hosts list storage as it was once, whatever has changed since; and until when."""
    unreadable: bool = False
    """Storage does not give what is on disk."""
    disk_full: bool = False
    drain_dead: bool = False
    """The drain process, and whatever starts it again."""
    agent_stalls: bool = False
    stalled: set[NodeId] = field(default_factory=set)
    """Nodes whose agents are held up; the word above is for all."""
    peers_hang: bool = False
    """When a rank is killed, those on other nodes notice nothing, and wait for it."""
    obeys_late_s: int = 0
    """How long the agent will be held up between reading the next record and obeying it."""
