"""What an agent tells the store before anything else: what the job is, and that one which was ended before its end goes on."""

from __future__ import annotations

from ..resilience.errors import UsageError
from ..resilience.keys import Keys
from ..resilience.machine import Phase
from ..resilience.orders import GenerationRecord
from ..resilience.requests import LEAVING
from ..resilience.signals import Generation, NodeId, NodeRecord, Request, Spec
from ..resilience.store import KeyAbsent, ModifiedAt, Put, Store
from ..resilience.wire import dumps, loads
from .launch import Launch
from .run_directory import RunDirectory


def register(
    store: Store, keys: Keys, launch: Launch, run: RunDirectory, me: NodeRecord, first: int, now: float
) -> None:
    """Say what the job is, or find that it is the one known here; open the next generation of one that was ended before its end.

    first: number of the first generation, larger than any that has left a snapshot here; now: wall-clock seconds. Raises UsageError for
    another command, and for a job that is finished.
    """
    command = (*launch.program[-1:], *launch.options, *launch.script)
    spec = Spec(command=command, nodes=1, created_s=now, first_generation=Generation(first))
    store.transact([KeyAbsent(keys.spec)], [Put(keys.spec, dumps(spec))])
    entry, record = store.get(keys.spec), store.get(keys.generation)
    known = loads(Spec, entry.value) if entry else spec
    if known.command != spec.command:
        raise UsageError(
            f"the run directory {run.root} belongs to another command ({' '.join(known.command)}); nothing was started. "
            "Name another directory with --run-dir"
        )
    if run.finished.exists():
        raise UsageError(f"the run in {run.root} is finished; name another directory with --run-dir to train anew")
    for key, asked in store.range(keys.requests).items():
        if loads(Request, asked.value).kind in LEAVING:  # nobody who asks an agent to stop means its successor
            store.delete(key)
    if record is None:
        return
    last = loads(GenerationRecord, record.value)
    moved = NodeId(me.host) not in last.members  # the same directory, on a host of another name
    if last.phase not in (Phase.ENDING, Phase.ENDED) and not moved:
        return
    # It was stopped, or gave up: to start it again means to go on, with budgets as new. The journal keeps what was.
    for prefix in (keys.incidents, keys.requests, keys.answers):
        store.delete_prefix(prefix)
    again = GenerationRecord(
        number=Generation(last.number + 1),
        phase=Phase.GATHER,
        members={NodeId(me.host): me.instance},
        reason="started again",
        opened_s=now,
    )
    store.transact([ModifiedAt(keys.generation, record.mod_revision)], [Put(keys.generation, dumps(again))])
