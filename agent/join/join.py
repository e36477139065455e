"""How this node joins the job: the agent checks the node, registers it with the job, and reads the job's description.

checks of this node ──▶ `registration.py` ──▶ same snapshots as the other nodes? ──▶ checks with other nodes ──▶ Joined
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...checkpoint.backend import paths
from ...checkpoint.backend.filesystem import Files
from ...checkpoint.backend.place import Place
from ...checkpoint.durable import catalog
from ...resilience.errors import NodeUnfit
from ...resilience.membership.rank_assignment import NodesPolicy
from ...resilience.model.generation import GenerationRecord
from ...resilience.model.node import NodeRecord, Spec
from ...resilience.model.types import Generation
from ...resilience.store.codec import loads
from ...resilience.store.protocol import first_put
from ...resilience.store.seat import Seat
from ..buddy.buddy_client import Copies
from ..config import AgentPolicy
from ..launch import scheduler_env
from ..launch.layout_adviser import simumax
from ..launch.megatron_layout import Fit, fitting, sentences
from ..launch.torchrun import Launch
from ..output.event_log import Telling
from ..peers.liveness_link import Neighbour
from ..preflight import rules
from ..preflight import run as checks
from ..preflight.rules import PreflightPolicy
from ..run_directory import BOOT, RunDirectory
from . import identity, storage_match
from .identity import ControlPolicy
from .patient_store import patient
from .registration import register


@dataclass(frozen=True)
class Places:
    endpoints: Sequence[str]
    """Endpoints of etcd."""
    root: Place
    """The place (a directory or object store) that holds `snapshots/`."""
    run: RunDirectory
    metrics_port: int = 0
    hosts_etcd: bool = False
    """This agent runs the etcd of all nodes."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    me: NodeRecord
    spec: Spec
    over: Generation
    """Number of the generation with which the job had ended before; 0: it had not ended."""
    neighbour: Neighbour | None
    """The watched next agent; None for a job of one node."""
    copies: Copies | None
    token: str
    """The secret that the nodes of this job share, in hexadecimal digits; empty: they need no secret."""

    @property
    def done(self) -> bool:
        """Return whether the whole job is finished, so that there is nothing to join."""
        return self.over >= self.spec.first_generation


def join(
    seat: Seat,
    launch: Launch,
    spec: Spec,
    control: ControlPolicy,
    at: Places,
    policies: Mapping[str, Any],
    telling: Telling,
    closing: ExitStack,
) -> Joined:
    """Check this node and register it. spec: the job's description from the command line. Raises NodeUnfit, the errors of `register`, and
    StoreUnavailable."""
    root, run, several = at.root, at.run, spec.nodes > 1
    if control.etcd:  # nothing restarts an etcd of this agent's own at this point
        seat = replace(seat, store=patient(seat.store, control.join_wait_s, telling.say))
    checking: PreflightPolicy = policies["preflight"]
    places = (root, Files(run.root))
    here = checks.alone(checking, launch.python, launch.ranks, places, os.environ) if checking.enabled else ()
    reasons = checks.told(here, telling)
    if reasons and not several:
        raise NodeUnfit(rules.unfit(seat.node, reasons) + "; nothing was started")
    neighbour = Neighbour() if several else None
    if neighbour:
        closing.callback(neighbour.close)
    me = NodeRecord(
        instance=secrets.token_hex(8),
        host=socket.gethostname(),
        pid=os.getpid(),
        ranks=launch.ranks,
        port=neighbour.port if neighbour else 0,
        metrics_port=at.metrics_port,
        address=identity.named(control.address) if control.address else identity.address(at.endpoints),
        # with the inode of the run directory: two containers on one machine may use one path for different directories
        home=f"{BOOT.read_text().strip()}:{run.root.stat().st_ino}:{run.root}" if neighbour else "",
        labels={**scheduler_env.labels(os.environ), **control.labelled},
        hosts_etcd=at.hosts_etcd,
    )
    copies, token = None, ""
    if max(spec.sizes) > 1 and policies["copies"].every_s:
        token = _token(seat)
        copies = Copies(launch.ranks, me.address, token, policies["copies"])
        me = replace(me, copies_port=copies.port)
    first = Generation(catalog.next_generation(root))  # it must exceed the generation of every snapshot
    fit = agreed(seat, launch, spec, policies["nodes"])
    asked = replace(spec, sizes=fit.numbers, layouts=fit.layouts, run=secrets.token_hex(4), first_generation=first)

    def kept() -> int:
        # Whether a job of one node is finished is recorded only in its run directory.
        durable = catalog.look(root).durable if several else ()
        return max((attempt.stamp.step for attempt in durable), default=-1)

    agent: AgentPolicy = policies["agent"]
    changed = telling.say if agent.changed_arguments else None
    spec, over = register(seat, asked, run, me, kept=kept, lease_s=agent.lease_s, changed=changed)
    joined = Joined(me=me, spec=spec, over=over, neighbour=neighbour, copies=copies, token=token)
    if joined.done:
        return joined
    if neighbour:
        storage_match.agree(seat, spec.first_generation, root / paths.SNAPSHOTS)
    if checking.enabled and checking.links and several and _beginning(seat, spec, over):
        met = checks.together(checking, seat, me.address, asked.nodes, me.instance)
        reasons = (*reasons, *checks.told([met], telling))
        # The check took time, and another agent may have described the job anew.
        spec, over = register(seat, spec, run, me, kept=kept, lease_s=agent.lease_s)
        joined = replace(joined, spec=spec, over=over)
    # The layouts are those of the first agent that registered. This agent may have computed others.
    for sentence in sentences(launch, spec.asked, replace(fit, numbers=spec.sizes, layouts=spec.layouts)):
        telling.say(sentence, "warn")
    me = replace(me, fit=rules.unfit(seat.node, reasons))
    if me.fit:
        telling.say(me.fit, "bad")
    return replace(joined, me=me)


def _token(seat: Seat) -> str:
    """Return the job's secret, which the first node to join generated. Raises StoreUnavailable."""
    return first_put(seat.store, seat.keys.token, secrets.token_hex(32).encode()).value.decode()


def _beginning(seat: Seat, spec: Spec, over: int) -> bool:
    """Return whether the nodes start together: no node trains yet, or no node trains any more."""
    last = seat.store.get(seat.keys.generation)
    return over > 0 or last is None or loads(GenerationRecord, last.value).number <= spec.given_up


def agreed(seat: Seat, launch: Launch, spec: Spec, policy: NodesPolicy) -> Fit:
    """Return the numbers of nodes that can hold a layout, and the layouts that are not the script's own. If another agent has registered,
    or snapshots may have such a layout, both come from the job's description in etcd: SimuMax may answer differently each time. Raises
    StoreUnavailable."""
    if entry := seat.store.get(seat.keys.spec):
        known = loads(Spec, entry.value)
        same = (known.command, known.ranks, known.asked) == (spec.command, spec.ranks, spec.asked)
        trained = bool(policy.simumax_model and known.layouts)
        if same and (trained or seat.store.range(seat.keys.nodes, limit=1)):
            return Fit(numbers=known.sizes, layouts=known.layouts)
    return fitting(launch, spec.asked, partial(simumax, policy) if policy.simumax_model else None)
