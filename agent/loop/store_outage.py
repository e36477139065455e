"""What the agent reports and does while etcd does not answer, and when etcd has lost its data.

no answer ──▶ reported once; the agent's own etcd is restarted
empty, or from an older backup ──▶ agents whose ranks train write the job, and its generation record, again
"""

from __future__ import annotations

from collections.abc import Callable

from ...resilience.errors import MachineError, ResilientError, StoreUnavailable
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import Spec
from ...resilience.model.state_machine import Phase
from ...resilience.store.codec import dumps, loads
from ...resilience.store.protocol import KeyAbsent, ModifiedAt, Put
from ...resilience.store.seat import Seat
from ...resilience.text import formatting
from ..join.exit_report import through
from ..join.static_nodes import WAIT_S
from ..node import Node
from ..output.event_log import Telling

EMPTIED_S = 30.0
"""Seconds that agents whose ranks train may take to write the job again into an etcd that has lost its data."""
PHASES = tuple(Phase)


class Outage:
    def __init__(
        self,
        node: Node,
        telling: Telling,
        mend: Callable[[], object] | None,
        cause: Callable[[], str],
        seat: Seat,
        spec: Spec,
        token: str,
        hosted: bool = False,
    ) -> None:
        """mend: called in each round in which etcd does not answer (embedded etcd: restart it). cause: returns why etcd does not answer, if
        known. spec, token: the job's description and secret, as this agent knew them when it joined. hosted: the etcd runs in another
        node's agent, so it may never come back. Times are in seconds, monotonic."""
        self._node, self._telling, self._mend = node, telling, mend
        self._cause, self._hosted = cause, hosted
        self._store, self._keys, self._spec, self._token = seat.store, seat.keys, spec, token
        self._down_s, self._ended = 0.0, False
        """Since when etcd does not answer, and whether the agent has reported that the training has reached its end."""
        self._emptied_s = 0.0
        """Since when etcd has lacked data about the job that it had before; 0: it lacks none."""
        self._lease = 0
        self._again = False
        """True: this agent's acknowledgements may belong to another generation with the same number."""
        self._met = False
        """True: this agent has read a generation record of the job."""

    def lasts(self, error: ResilientError, now_s: float, *, fenced_soon: bool = False) -> None:
        """Report once that etcd does not answer, and call `mend`. fenced_soon: the ranks must end when the lease expires. Raises
        StoreUnavailable if the etcd of another node's agent stays away and no rank runs here."""
        ended = through(self._node.board.pages)
        self._telling.progress.stored(None)
        if not self._down_s or ended > self._ended:
            self._down_s, self._ended = self._down_s or now_s, ended
            full = self._cause()
            what = f"etcd does not answer, and {full}" if full else str(error)
            self._telling.say(f"{what}; {_until(ended, fenced_soon)}", "bad")
        if self._mend:
            self._mend()
        group = self._node.group
        if self._hosted and now_s - self._down_s > WAIT_S and not (group and group.living()):
            raise StoreUnavailable(
                f"the etcd of the first node has not answered for {WAIT_S:.0f} s, and no rank runs here any more. The agent exits. Give "
                "the same command again on all nodes: the job continues from its newest snapshot on disk"
            )

    def over(self, now_s: float) -> None:
        if self._down_s:
            self._telling.say(f"etcd answers again, after {formatting.seconds(now_s - self._down_s)}", "good")
        self._down_s, self._ended = 0.0, False

    def held(self, lease: int, known: GenerationRecord | None) -> bool:
        """Return whether etcd may have lost data that this agent has written. A sign of that is a new lease. lease: the present lease.
        known: the newest record. Until this run of the job begins, each waiting agent writes the job's description if etcd has none. Raises
        StoreUnavailable, and MachineError if etcd has another run of the job."""
        if lease == self._lease and not self._again:
            return False
        if known is None or known.number < self._spec.first_generation:
            self._store.transact([KeyAbsent(self._keys.spec)], self._job())
            self._same()
        self._lease, self._again = lease, False
        return True

    def looked(
        self, found: GenerationRecord | None, known: GenerationRecord | None, now_s: float
    ) -> GenerationRecord | None:
        """Return the record to obey. found: the record in etcd; known: the last record that this agent read. If etcd is empty, or from a
        backup, an agent with ranks of this generation writes the record again. While an agent's ranks are not fenced, no later generation
        can have begun. Once the job ends, no generation can begin, so each agent writes the record. In a job of one node, the agent always
        writes it. An agent without such ranks waits for EMPTIED_S. Raises StoreUnavailable. Raises MachineError if no agent has written the
        record by then, or if etcd has another job than this agent's."""
        group = self._node.group
        ours = group is not None and known is not None and group.generation == known.number and not group.fenced
        nothing_lost = known is None or (found is not None and _as_far(found, known, begun=ours or known.settled))
        if found is not None and (not self._met or (self._emptied_s and nothing_lost)):
            self._same()
            self._met = True
        if known is None or nothing_lost:
            self._again |= self._emptied_s > 0
            self._emptied_s = 0.0
            return found
        if not self._emptied_s:
            self._emptied_s = now_s
            self._telling.say("etcd has lost its data about this job; agents whose ranks train write it again", "bad")
        alone = self._spec.nodes == 1
        if alone or known.over or ours:
            self._remind(known)
        elif now_s - self._emptied_s > EMPTIED_S:
            raise MachineError(
                "etcd has lost its data about this job, and no agent has ranks that train and could write it again. No rank runs here any "
                "more. Check etcd, then give the same command again: it continues from the newest snapshot"
            )
        return known

    def _remind(self, record: GenerationRecord) -> None:
        """Write the job and the record into etcd again, unless another agent has done so."""
        there = self._store.get(self._keys.generation)
        if there is not None and _as_far(loads(GenerationRecord, there.value), record, begun=True):
            return
        unchanged = ModifiedAt(there.key, there.mod_revision) if there else KeyAbsent(self._keys.generation)
        self._store.transact([unchanged], [*self._job(), Put(self._keys.generation, dumps(record))])

    def _job(self) -> list[Put]:
        secret = [Put(self._keys.token, self._token.encode())] if self._token else []
        return [Put(self._keys.spec, dumps(self._spec)), *secret]

    def _same(self) -> None:
        """Raise MachineError if etcd has another run of the job. etcd has another run if an agent joined while etcd was empty, and
        described the job anew before the other agents could write it again."""
        entry = self._store.get(self._keys.spec)
        there = loads(Spec, entry.value) if entry else self._spec
        if there.first_generation < self._spec.first_generation:
            raise MachineError(
                "etcd has the data of an older backup, from a run of this job that was over when this agent joined. The agent exits. Give "
                "the same command again: it continues from the newest snapshot"
            )
        if there.run != self._spec.run:
            raise MachineError(
                "etcd has lost its data, and other agents have started this job anew without this agent. The agent exits. Give the same "
                "command again: it joins the new run"
            )


def _until(ended: bool, fenced_soon: bool) -> str:
    if ended:
        return "the training has reached its end, and the job ends once etcd is back"
    if fenced_soon:
        return (
            "training continues until this agent's lease expires. Then the agent ends its ranks, because the spares could start without "
            "them"
        )
    return "training continues, but no dead or hung rank is restarted until etcd is back"


def _as_far(found: GenerationRecord, known: GenerationRecord, *, begun: bool) -> bool:
    """Return whether record `found` is at least as new as `known`. begun: ranks may have been started, so phases count. If no ranks were
    started, the generation may repeat its first phase (GATHER)."""
    if found.number != known.number:
        return found.number > known.number
    return not begun or PHASES.index(found.phase) >= PHASES.index(known.phase)
