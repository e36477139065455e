"""A job on one simulated node, played second by second and told as prose: what an episode plays with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mt_resilient.checkpoint.header import Stamp
from mt_resilient.resilience import describe
from mt_resilient.resilience.boundary import RankPolicy
from mt_resilient.resilience.controller import Controller
from mt_resilient.resilience.decision import Decision, Policy
from mt_resilient.resilience.election import Election
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.machine import Phase
from mt_resilient.resilience.memory_store import MemoryStore
from mt_resilient.resilience.orders import Incident
from mt_resilient.resilience.recovery import RecoveryPolicy
from mt_resilient.resilience.signals import Request
from mt_resilient.resilience.wire import dumps
from mt_resilient.resilience.world import World, read_world

from .etcd import Client, Etcd
from .faults import Faults
from .invariants import Watch
from .kept import Kept, Restored, State
from .node import KEYS, Node
from .ranks import Ranks

START_S = 1_000_000.0

_DOES = {
    Phase.GATHER: "opens",
    Phase.LAUNCH: "launches",
    Phase.RUN: "runs",
    Phase.ENDING: "is ending",
    Phase.ENDED: "has ended",
}


class Job:
    """The whole of it, from outside: what an episode plays with."""

    def __init__(
        self,
        *,
        total: int = 12,
        durable_every: int = 4,
        ranks: int = 2,
        policy: RecoveryPolicy | None = None,
        judged_by: RankPolicy | None = None,
        **faults: Any,
    ) -> None:
        """total: steps of the training; faults: of `Faults`."""
        self.total, self.durable_every, self.faults = total, durable_every, Faults(**faults)
        self.ranks_each = ranks
        self.policy = policy or RecoveryPolicy()
        self.judged_by = judged_by or RankPolicy()
        self.now_s = START_S
        self.watch = Watch()
        self.skew_s = 0.0
        """What the wall clock has been set forward by."""
        self.store: Any = Etcd(
            MemoryStore(lambda: self.now_s), KEYS, lambda write: self.watch.accepted(self, write, KEYS)
        )
        self.disk: dict[int, State] = {}
        self.written: dict[int, Kept] = {}
        """Of the snapshots on disk, all that is in them;"""
        self.stamps: dict[int, tuple[str, Stamp]] = {}
        """and which life of the agent has written them, as what."""
        self.rejected: set[int] = set()
        self.lines: list[str] = []
        self.sentences: list[str] = []
        self.stepped: list[int] = []
        self.lives = 0
        self.incidents: dict[tuple[int, str], Incident] = {}
        """By generation and number: the numbers start anew when a job that was over is started again."""
        self.computed = 0
        """Steps in all, those computed again included."""
        self.standby: list[tuple[Controller, int]] = []
        self.node: Node | None = None
        self.strays: list[Ranks] = []
        """Ranks that lived on when others were started."""
        self.missed: list[int] = []
        """Steps of which a rank could not take its copy."""
        self.restored: list[Restored] = []
        """What ranks have gone on from, in turn."""
        self.last_state: State = ()
        self.exit_code: int | None = None
        self.phase_told: tuple[int, Phase] | None = None
        """Of the newest record that a controller wrote."""
        self.start_agent()

    # -- what an episode does to it ---------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        self.lives += 1
        self.exit_code = None
        try:
            self.node = Node(self, f"life-{self.lives}")
        except StoreUnavailable:
            self.say("an agent is started, finds that etcd does not answer, and leaves")
            return
        self.say("an agent starts" if self.lives == 1 else "the agent is started again")

    def kill_agent(self) -> None:
        """SIGKILL: its ranks and its memory die with it, its lease lives on."""
        self.say("the agent is killed, its ranks and its memory with it")
        self.node = None

    def ask_to_stop(self, snapshot: bool) -> None:
        assert self.node
        self.say(f"somebody presses Ctrl-C{', with --last-snapshot' if snapshot else ''}")
        self.node.asked = Request(kind="stop", snapshot=snapshot, exit_code=130, at_s=self.now_s, by="SIGINT")

    def order(self, kind: str, **what: Any) -> str:
        """Somebody at another terminal; the request's name."""
        ident = f"{self.now_s:05.0f}-{kind}"
        self.say(f"somebody orders: {kind}{''.join(f', {name} {value}' for name, value in what.items())}")
        self.store.inner.put(KEYS.request(ident), dumps(Request(kind=kind, at_s=self.now_s, by="alice", **what)))
        return ident

    def until_answered(self, ident: str) -> None:
        self.until(lambda job: ident in job.world().answers)

    def stop_store(self) -> None:
        self.say("etcd stops answering")
        self.store.down = True

    def start_store(self) -> None:
        self.say("etcd answers again")
        self.store.down = False

    def kill_rank(self, rank: int) -> None:
        self.ranks.kill(rank, self.now_s + 0.5)

    def stand_by(self) -> None:
        """An agent without ranks joins, which could lead."""
        self.standby.append((self.controller("the stand-by"), self.store.grant(3600)))

    def depose(self) -> None:
        """The leader loses its leadership, and the stand-by is quicker."""
        self.say("the leader is deposed")
        self.store.delete(KEYS.leader)
        controller, lease = self.standby[0]
        with suppress(StoreUnavailable):
            controller.tick(lease, self.wall_s)

    @property
    def wall_s(self) -> float:
        return self.now_s + self.skew_s

    @property
    def ranks(self) -> Ranks:
        assert self.node
        assert self.node.ranks
        return self.node.ranks

    def until(self, reached: Callable[[Job], bool], patience: int = 60) -> None:
        """Play until `reached`; a job that does not get there within `patience` seconds hangs."""
        for _ in range(patience):
            if reached(self):
                return
            self.tick()
        raise AssertionError("the job hangs:\n" + self.transcript())

    def until_step(self, step: int) -> None:
        self.until(lambda job: bool(job.node and job.node.ranks and job.ranks.step >= step))

    def until_phase(self, phase: Phase, number: int) -> None:
        self.until(lambda job: bool((r := job.world().record) and r.number == number and r.phase is phase))

    def to_the_end(self) -> None:
        self.until(lambda job: job.exit_code is not None, patience=200)

    # -- playing ------------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.now_s += 1.0
        self.store.settle(self.now_s)
        quiet = len(self.stepped)
        if self.node:
            self.exit_code = self.node.round(self.now_s)
        for controller, lease in self.standby:
            with suppress(StoreUnavailable):
                controller.tick(lease, self.wall_s)
        self._write_line(quiet)
        self.watch.look(self)

    def controller(self, identity: str) -> Controller:
        def told(decision: Decision) -> None:
            self._hear(f" (says {identity})" if self.standby else "", decision)

        store: Any = self.client(identity)
        return Controller(store, KEYS, Election(store, KEYS.leader, identity), self._policy, told)

    def client(self, identity: str) -> Client:
        return Client(self.store, identity, lambda: self.now_s)

    @property
    def _policy(self) -> Policy:
        return Policy(recovery=self.policy, ladder=self.judged_by.ladder, observe=self.judged_by.observe)

    def _hear(self, who: str, decision: Decision) -> None:
        """Tell what a controller wrote."""
        for incident in decision.incidents:
            key = (incident.generation, incident.id)
            known = self.incidents.get(key)
            self.incidents[key] = incident
            if known is None:
                self.say(f"incident {incident.id}{who}: {incident.summary}")
            if not incident.open and (known is None or known.open):
                self.say(f"incident {incident.id} is over")
        for answer in decision.answers.values():
            self.say(f"the answer: {answer.sentence}")
        record = decision.record
        if decision.said:
            self.say(f"passed on to the ranks: {decision.said}")
        if record is None or (record.number, record.phase) == self.phase_told:
            return
        self.phase_told = (record.number, record.phase)
        why = {Phase.GATHER: record.reason, Phase.LAUNCH: decision.reason, Phase.ENDING: record.reason}
        reason = f": {why[record.phase]}" if record.phase in why else ""
        self.say(f"generation {record.number} {_DOES[record.phase]}{who}{reason}")

    def world(self) -> World:
        entries = self.store.inner.range(KEYS.root)
        return read_world(KEYS, {key: entry.value for key, entry in entries.items()})

    # -- telling --------------------------------------------------------------------------------------------------------------------

    def say(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def _write_line(self, quiet: int) -> None:
        """One line for this second; seconds in which the ranks did nothing but step share one. quiet: steps of seconds before."""
        if self.sentences:
            if quiet:
                self.lines.append(f"        {_done(self.stepped[:quiet])}")
            now = [_done(self.stepped[quiet:])] if self.stepped[quiet:] else []
            self.lines.append(f"{self.now_s - START_S:4.0f} s  {'; '.join([*now, *self.sentences])}")
            self.sentences.clear()
            self.stepped.clear()

    def transcript(self) -> str:
        """What happened, second by second, then what `explain` would tell."""
        told = [
            line
            for number, incident in enumerate(self.incidents.values(), 1)
            for line in describe.story(incident, f"at {incident.at_s - START_S:g} s", str(number))
        ]
        end = f"the final state has used the samples {' '.join(map(str, self.last_state)) or 'none'}"
        return "\n".join([*self.lines, end, *([""] if told else []), *told]) + "\n"


def _done(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]} are done" if len(steps) > 1 else f"step {steps[0]} is done"
