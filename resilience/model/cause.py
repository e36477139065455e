"""What an incident's cause may be: as incidents, metrics and alerts name it."""

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
    """Died by a signal, or without a word."""
    SCRIPT_RAISED = "script_raised"
    """Left with an exit code other than 0: an exception, or sys.exit."""
    AGENT_RESTARTED = "agent_restarted"
    """A member's agent is a new process: none of its predecessor's ranks can be alive."""
    AGENT_LOST = "agent_lost"
    """A member's lease is gone."""
    NON_FINITE = Kind.NON_FINITE.value
    """NaN or Inf in loss, gradient or parameters."""
    LOSS_SPIKE = Kind.LOSS_SPIKE.value
    """The loss has gone up and stays there."""
    GRADIENT_SPIKE = Kind.GRADIENT_SPIKE.value
    """The norm of the gradient is beyond what data can do."""
    RANK_HUNG = "rank_hung"
    """Lives, and does not move."""
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    """Data-parallel replicas, the same to the last bit before, are not any more: a bit has flipped, or a core computes wrongly."""
    ORDERED = OrderedBy.OPERATOR.value
    """Nothing is wrong: somebody wants the ranks to go back."""
    FROZEN = "frozen"
    """No parameter changes any more, although steps are done. Told only."""
    DEVICE_SICK = "device_sick"
    """A device counts errors, or its driver says that it is broken. Told, and evidence of what strikes its node. Told only."""
    MEMORY_SHORT = "memory_short"
    """Memory is about to run out. Told, and snapshots go to disk more often."""
    MOVED = "moved"
    """Nothing is wrong: other nodes are to train, for one is drained, or has come back."""
    CUT_OFF = "cut_off"
    """A member does not reach etcd, and trains all the same. Told only."""
    STRAGGLER = "straggler"
    """A rank's own time for a step is longer than its peers'. Told only."""
    SNAPSHOT_UNUSABLE = "snapshot_unusable"
    """The state to resume from is damaged."""
    SNAPSHOT_UNREADABLE = "snapshot_unreadable"
    """The state to resume from could not be read: storage does not answer."""
    STATE_REFUSED = "state_refused"
    """The state to resume from is another model's, or another layout's."""
    STATE_UNSAVABLE = "state_unsavable"
    """What the script gives to its Session can't be saved."""
    TORCH_MISSING = "torch_missing"
    """The launcher cannot import torch."""
