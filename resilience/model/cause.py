"""The possible causes of an incident, as incidents, metrics and alerts name them."""

from __future__ import annotations

from enum import StrEnum

from .types import OrderedBy


class Kind(StrEnum):
    """What is wrong with a step. The values are causes of incidents."""

    NON_FINITE = "non_finite"
    LOSS_SPIKE = "loss_spike"
    GRADIENT_SPIKE = "gradient_spike"


class Cause(StrEnum):
    RANK_KILLED = "rank_killed"
    """The rank died by a signal, or left no message."""
    SCRIPT_RAISED = "script_raised"
    """The rank exited by itself, by an exception or sys.exit; with exit code 0 too, if its loop was not over."""
    AGENT_RESTARTED = "agent_restarted"
    """A member's agent is a new process: none of its predecessor's ranks can be alive."""
    AGENT_LOST = "agent_lost"
    """A member's lease expired, or its neighbour saw its agent die."""
    NON_FINITE = Kind.NON_FINITE.value
    """NaN or Inf in loss, gradient or parameters."""
    LOSS_SPIKE = Kind.LOSS_SPIKE.value
    """The loss has gone up and stays up."""
    GRADIENT_SPIKE = Kind.GRADIENT_SPIKE.value
    """The gradient norm is larger than any data can make it."""
    RANK_HUNG = "rank_hung"
    """The rank is alive and makes no progress."""
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    """Data-parallel replicas that held the same bits have diverged: a bit flipped, or a core computes wrongly."""
    ORDERED = OrderedBy.OPERATOR.value
    """Nothing is wrong: an operator ordered the ranks to go back."""
    FROZEN = "frozen"
    """No parameter changes any more, although steps complete. Reported only."""
    DEVICE_SICK = "device_sick"
    """A device counts errors, or its driver says that it is broken. Reported only, and used as evidence for faults of its node."""
    MEMORY_SHORT = "memory_short"
    """Memory is about to run out. It is reported, and snapshots go to disk more often."""
    MOVED = "moved"
    """Nothing is wrong: the members change, because a node is drained or has come back."""
    CUT_OFF = "cut_off"
    """A member does not reach etcd, but still trains. Reported only."""
    STRAGGLER = "straggler"
    """A rank's own time for a step is longer than its peers'. Reported only."""
    SNAPSHOT_UNUSABLE = "snapshot_unusable"
    """The state to resume from is damaged."""
    SNAPSHOT_UNREADABLE = "snapshot_unreadable"
    """The state to resume from could not be read: storage does not answer."""
    STATE_REFUSED = "state_refused"
    """The state to resume from belongs to another model or another layout."""
    STATE_UNSAVABLE = "state_unsavable"
    """What the script gives to its Session can't be saved."""
    TORCH_MISSING = "torch_missing"
    """The launcher cannot import torch."""
