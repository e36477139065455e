"""Records how the time of a simulated run was spent: each second belongs to one account, and the accounts add up to the whole run."""

from __future__ import annotations

from collections.abc import Mapping

STEPS, REPLAY, SNAPSHOTS, STRAGGLERS, FEWER = "steps", "replay", "snapshots", "stragglers", "fewer"
ACCOUNTS: Mapping[str, str] = {
    STEPS: "steps that count, at their full speed",
    "detect": "from a fault to the decision",
    "stop": "until no process of the old worker group is left, and all nodes have reported it",
    "nodes": "until a node takes a lost node's place",
    "start": "until the new ranks have started",
    "build": "until process groups and model are built",
    "restore": "restoring the state, into new processes or in place, and waiting for the fetch of a lost node's part",
    "step": "the time by which a first step takes longer",
    REPLAY: "steps computed again, and the step that a fault interrupted",
    SNAPSHOTS: "boundaries, and stalls for snapshots in memory and on disk",
    STRAGGLERS: "the time by which a slow node makes steps longer",
    FEWER: "the time by which steps take longer because fewer nodes compute the same batch",
    "operator": "until an operator restarts a job that gave up",
}
"""The accounts and their meanings, in the order of a recovery's phases."""
TRAINING = "training"
"""Training is not an account: `trained` divides this time among several accounts."""


class Books:
    def __init__(self, step_s: float, now_s: float) -> None:
        """step_s: seconds of a step without our overhead."""
        self.spent_s = dict.fromkeys(ACCOUNTS, 0.0)
        self.reached = 0.0
        """The furthest step that the training has ever reached. Steps up to it have been computed before."""
        self._step_s = step_s
        self._since_s, self._account = now_s, "start"

    def enter(self, now_s: float, account: str) -> None:
        """Count time in `account` from now on."""
        if self._account != TRAINING:
            self.spent_s[self._account] += now_s - self._since_s
        self._since_s, self._account = now_s, account

    def trained(self, now_s: float, before: float, after: float, added_s: float, shared_s: float) -> None:
        """Count the time since the last call (of `enter` or `trained`), in which steps `before` to `after` were computed. added_s: our
        overhead for each step; shared_s: seconds added to each step because fewer nodes share the batch."""
        assert self._account == TRAINING
        new = max(0.0, after - max(before, self.reached))
        took_s, steps = now_s - self._since_s, after - before
        self.spent_s[STEPS] += new * self._step_s
        self.spent_s[REPLAY] += (steps - new) * self._step_s
        self.spent_s[SNAPSHOTS] += steps * added_s
        self.spent_s[FEWER] += steps * shared_s
        self.spent_s[STRAGGLERS] += took_s - steps * (self._step_s + added_s + shared_s)
        self.reached = max(self.reached, after)
        self._since_s = now_s
