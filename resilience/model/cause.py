"""The possible causes of an incident, as incidents, metrics and alerts name them."""

from __future__ import annotations

from enum import StrEnum

from .types import OrderedBy


class Kind(StrEnum):
    """What can be wrong with a step. Each value is also the cause of an incident."""

    NON_FINITE = "non_finite"
    LOSS_SPIKE = "loss_spike"
    GRADIENT_SPIKE = "gradient_spike"
    LOSS_DIVERGENCE = "loss_divergence"


class Cause(StrEnum):
    RANK_KILLED = "rank_killed"
    """A signal killed the rank, or it ended without a message."""
    SCRIPT_RAISED = "script_raised"
    """The script ended the rank by an exception or sys.exit. Exit code 0 counts too, if the training loop was not over."""
    AGENT_RESTARTED = "agent_restarted"
    """A member's agent is a new process, so all ranks of the agent before it are dead."""
    AGENT_LOST = "agent_lost"
    """A member's lease expired, or a neighbour node saw the member's agent die."""
    NON_FINITE = Kind.NON_FINITE.value
    """NaN or Inf in loss, gradient or parameters."""
    LOSS_SPIKE = Kind.LOSS_SPIKE.value
    """The loss has gone up. The ranks wait and see whether it comes back."""
    GRADIENT_SPIKE = Kind.GRADIENT_SPIKE.value
    """A gradient norm is far above the usual one. The ranks wait and see whether the loss follows."""
    LOSS_DIVERGENCE = Kind.LOSS_DIVERGENCE.value
    """The loss has gone up, and has not come back: the training has lost a part of its progress."""
    RANK_HUNG = "rank_hung"
    """The rank is alive, but makes no progress."""
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    """Data-parallel replicas that held the same bits have diverged: a bit flipped, or a core computes wrongly."""
    ORDERED = OrderedBy.OPERATOR.value
    """No fault: an operator ordered the ranks to rewind."""
    FROZEN = "frozen"
    """The parameters no longer change, although steps complete. The program only reports this."""
    DEVICE_SICK = "device_sick"
    """A device counts errors, or its driver reports that it is broken. The program only reports this, and counts it as evidence for other
    faults of the node."""
    MEMORY_SHORT = "memory_short"
    """A node's memory is about to run out. The program reports this, and writes snapshots to disk more often."""
    MOVED = "moved"
    """No fault: the set of training nodes changes, because a node is drained or has come back."""
    CUT_OFF = "cut_off"
    """A member's agent does not reach etcd, but its ranks still train. The program only reports this."""
    STRAGGLER = "straggler"
    """A rank's own time for a step is longer than its peers'. The program only reports this."""
    SNAPSHOT_UNUSABLE = "snapshot_unusable"
    """The snapshot to resume from is damaged."""
    SNAPSHOT_UNREADABLE = "snapshot_unreadable"
    """The snapshot to resume from could not be read, because storage does not answer."""
    STATE_REFUSED = "state_refused"
    """The snapshot to resume from belongs to another model or another layout."""
    STATE_UNSAVABLE = "state_unsavable"
    """An object that the script gives to its Session can't be saved."""
    TORCH_MISSING = "torch_missing"
    """The launcher cannot import torch."""
