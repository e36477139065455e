"""Sends an operator's order (a command such as `rewind`) from another terminal: writes the order into etcd, where the controller reads it,
and waits until the order is carried out.

    command line ──requests/<id>──▶ etcd ──▶ controller … ranks ──▶ answers/<id> ──▶ one sentence and an exit code

The order stays in etcd until the controller answers it, even if this command no longer waits or another agent becomes the leader.
"""

from __future__ import annotations

import getpass
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

from ...checkpoint.backend.paths import ORDERED, Attempt
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog, commit
from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.decide import operator_requests
from ...resilience.decide.operator_requests import LEAVING
from ...resilience.errors import MachineError, ResilientError, SnapshotError, StoreRefused, StoreUnavailable, UsageError
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeRecord
from ...resilience.model.request import Answer, Request, Wish
from ...resilience.model.types import NodeId
from ...resilience.report import doubts
from ...resilience.report.journal import Journal
from ...resilience.store.codec import dumps, loads
from ...resilience.store.etcd.access import Papers
from ...resilience.store.etcd.client import EtcdStore
from ...resilience.store.keys import Keys
from ...resilience.store.protocol import KeyAbsent, Put, Store
from ..run_directory import RunDirectory
from .explain import look
from .run_reader import RunReader

_LOOK_S = 0.1
UNDER_WAY = "the order was sent, but is not carried out yet; Ctrl-C ends the waiting, not the order"
_UNKNOWN = (
    "It is not known whether the order has arrived in etcd. If mt-resilient status lists it, it will be carried out; so do not repeat it "
    "before etcd answers"
)
LONG_S = 3.0
"""Seconds after which the command prints that it still waits for the order."""


class Sending:
    """Writes an order into etcd. A write that etcd does not answer may have been made, so it is repeated under the same key: etcd never has
    the order twice."""

    def __init__(self, store: Store, keys: Keys, asked: Request) -> None:
        self.store, self.keys, self.asked = store, keys, asked
        self.arrived = False
        """Whether etcd has confirmed that it has the order."""
        self.doubted = False
        """Whether etcd has not answered a write. Such a write may still be made later."""

    def attempt(self) -> None:
        """Write the order, unless it has arrived. Raises StoreRefused."""
        request, answer = self.keys.request(self.asked.id), self.keys.answer(self.asked.id)
        try:
            if not self.arrived:
                self.store.transact([KeyAbsent(request), KeyAbsent(answer)], [Put(request, dumps(self.asked))])
            self.arrived = True
        except StoreRefused:
            raise
        except StoreUnavailable:
            self.doubted = True

    def tidy(self) -> None:
        """Delete the order and its answer. If they cannot be deleted, or a write of the order may still be made, a later start deletes
        them."""
        with suppress(StoreUnavailable):
            if not self.doubted:
                self.store.delete(self.keys.request(self.asked.id))
                self.store.delete(self.keys.answer(self.asked.id))


def order(directory: RunDirectory, request: Request, back: Place | None = None) -> int:
    """Send the order, wait until it is carried out, and print one sentence. Return 0 if it was carried out, else the exit code of the
    reason why not. back: a snapshot to come back to. Unless the order is refused, this snapshot is marked as ordered, so that it is not
    deleted as too old when newer ones follow. Raises UsageError if no agent runs here, and StoreUnavailable."""
    place = directory.agent()
    if place is None:
        nodes = [each for each in directory.nodes if each.root.parent.name == "nodes"]
        if elsewhere := sorted(each.root.name for each in nodes if each.endpoint.exists() and not each.gone):
            raise UsageError(
                f"no agent of this job runs on this machine; give the order on one of: {', '.join(elsewhere)}. Nothing was done"
            )
        last = _last_said(directory, 0.0)
        raise UsageError(
            f"no agent is running in {directory.root}: no order can be sent.{f' Its last message: {last}' if last else ''}"
        )
    asked = replace(request, id=f"{int(wall_s() * 1e6):017d}-{secrets.token_hex(3)}", at_s=wall_s(), by=_who())
    keys = Keys(place["job"])
    access = Papers(**place.get("papers", {})).access(os.environ)
    with closing(EtcdStore(place["endpoints"], deadline_s=2.0, access=access)) as store:
        if asked.kind == Wish.DRAIN:
            asked = replace(asked, instance=_instance(store, keys, NodeId(asked.node)))
        sending, marked = Sending(store, keys, asked), False
        try:
            sending.attempt()
            marked = back is not None and _mark(back)
            answer = _wait(directory, sending, place["pid"])
        except KeyboardInterrupt:
            stays = "The order stays in etcd, and will still be carried out; see: mt-resilient status"
            print(f"no longer waiting. {stays if sending.arrived else _UNKNOWN}")
            return 130
        sending.tidy()
    if back and marked and answer.exit_code in (UsageError.exit_code, SnapshotError.exit_code):
        with suppress(MachineError):
            back.delete(ORDERED)
    where = _directory(directory, answer) if asked.kind == Wish.SNAPSHOT and not answer.exit_code else ""
    print(f"{answer.sentence}{where}")
    return answer.exit_code


def _mark(snapshot: Place) -> bool:
    """Mark the snapshot as ordered, and return whether it was not marked before."""
    with suppress(MachineError):
        if not snapshot.there(ORDERED):
            commit.mark(snapshot, ORDERED)
            return True
    return False


def _instance(store: Store, keys: Keys, node: NodeId) -> str:
    """Return the instance (identity of one agent process) that is registered as `node`, or else that of the member with this name. Empty:
    there is neither."""
    here, record = store.get(keys.node(node)), store.get(keys.generation)
    if here:
        return loads(NodeRecord, here.value).instance
    return loads(GenerationRecord, record.value).members.get(node, "") if record else ""


def _wait(directory: RunDirectory, sending: Sending, pid: int) -> Answer:
    store, keys, asked = sending.store, sending.keys, sending.asked
    since_s, told, reader = monotonic_s(), set[str](), RunReader([directory])
    while True:
        if monotonic_s() - since_s > LONG_S:
            since_s = monotonic_s()
            for what, words in _delays(directory, sending, reader):
                if what not in told:
                    print(words, file=sys.stderr)
                told.add(what)
        present = directory.agent()
        if present is None or (asked.kind in LEAVING and present["pid"] != pid):
            return _without_agent(directory, asked, sending.arrived)
        sending.attempt()
        with suppress(StoreUnavailable):  # etcd may come back; the agent takes care of that
            entry = store.get(keys.answer(asked.id))
            answer = loads(Answer, entry.value) if entry else None
            if answer and (answer.exit_code or asked.kind not in LEAVING or not _over(store, keys)):
                return answer
        sleep(_LOOK_S)


def _delays(directory: RunDirectory, sending: Sending, reader: RunReader) -> Iterator[tuple[str, str]]:
    """Yield the known reasons why the order is not carried out yet, each as a kind and a sentence. The caller prints the first sentence of
    each kind."""
    if not sending.arrived:
        yield "no answer", "etcd does not answer; the order is sent again until it does. Ctrl-C ends this command"
        return
    yield "under way", UNDER_WAY
    world, asked = look(directory), sending.asked
    first = operator_requests.earlier(asked, world) if world else None
    if first:
        yield "earlier", f"first, the job carries out an earlier order: {first.kind}, ordered by {first.by}"
    reader.look()
    why = doubts.unwritten(reader.last)
    if why:
        yield "disk", f"the last snapshot could not be written to disk, and is tried again: {why}"
    if world and asked.kind not in LEAVING and not any(said.stepped_s for said in world.status.values()):
        yield (
            "no step",
            "the ranks have reported no step yet, and obey between two steps; a script without a watched loop reports none",
        )


def _over(store: Store, keys: Keys) -> bool:
    """Return whether the job has ended, or is ending. In either case the agent is about to exit."""
    entry = store.get(keys.generation)
    return entry is None or loads(GenerationRecord, entry.value).over


def _without_agent(directory: RunDirectory, asked: Request, arrived: bool) -> Answer:
    """Return the answer if the agent is gone: the order ended the agent, the job ended for another reason, or the agent was killed.
    arrived: etcd has the order; False: that is not known."""
    ends = [line for line in Journal(directory.journal).read() if line["kind"] == "end" and line["at_s"] >= asked.at_s]
    if not ends:
        sentence = "the agent is gone, and did not exit normally"
        if not arrived:
            sentence += f". {_UNKNOWN}"
        elif asked.kind not in LEAVING:
            sentence += "; the order stays in etcd, and is carried out when the same command is given again"
        return Answer(sentence=sentence, exit_code=MachineError.exit_code)
    code, said = int(ends[-1]["code"]), _last_said(directory, asked.at_s)
    if asked.kind in LEAVING:
        return Answer(sentence=said, exit_code=0 if code in (asked.exit_code, 0) else code)
    return Answer(sentence=f"the job ended before the order was carried out: {said}", exit_code=MachineError.exit_code)


def _last_said(directory: RunDirectory, since_s: float) -> str:
    said = [line for line in Journal(directory.journal).read() if line["kind"] == "said" and line["at_s"] >= since_s]
    return str(said[-1]["sentence"]) if said else ""


def _directory(directory: RunDirectory, answer: Answer) -> str:
    with suppress(ResilientError):
        for snapshot in catalog.committed(directory.kept()):
            attempt = Attempt.parse(snapshot.name)
            if attempt and attempt.stamp.step == answer.step:
                return f": {snapshot}"
    return ""


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "an operator"
