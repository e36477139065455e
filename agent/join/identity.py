"""The job's etcd, and this node's name and address: from mt-resilient's own options, a scheduler and torchrun's options."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from ipaddress import ip_address

from ...resilience.clock import monotonic_s, sleep, wall_s
from ...resilience.errors import MachineError, StoreRefused, StoreUnavailable, UsageError
from ...resilience.membership.rank_assignment import NodesPolicy, sizes
from ...resilience.model.node import NodeRecord
from ...resilience.store.codec import loads
from ...resilience.store.etcd.access import Access, Papers, parse_endpoint
from ...resilience.store.etcd.client import EtcdStore
from ...resilience.store.keys import Keys
from ...resilience.store.protocol import Store
from ...resilience.text import formatting
from ..config import AgentPolicy
from ..etcd.server import EmbeddedEtcd, probe, started
from ..launch import scheduler_env
from ..launch.ports import address_towards
from ..launch.torchrun import Launch
from ..output.terminal import Terminal
from ..run_directory import RunDirectory
from .patient_store import AGAIN_S


@dataclass(frozen=True, kw_only=True)
class ControlPolicy:
    """The job's etcd, and this node's name and address."""

    etcd: str = ""
    """Endpoints of an etcd: `HOST:PORT,…` or `https://HOST:PORT,…`. Empty: the agent starts its own etcd, for one
    node. Short: `--etcd`."""
    job: str = ""
    """The job's name, the same on all its nodes. Empty: the name that a scheduler or `--rdzv-id` gives; for one
    node, the name of its run directory. Short: `--job`."""
    node: str = ""
    """This node's name. Empty: the name that a scheduler gives, or the host's. Short: `--node`."""
    address: str = ""
    """Address at which other nodes reach this one. Empty: its address on the way to etcd. Short: `--address`."""
    labels: str = ""
    """Labels of this node, `KEY=VALUE,…`. Nodes with the same `rack` are assumed to fail together. Empty: the labels
    that a scheduler gives. Short: `--label`."""
    deadline_s: float = 2.0
    """How long one call to etcd may take."""
    join_wait_s: float = 60.0
    """How long an agent that starts waits for the endpoints of `control.etcd`, if none of them answers, before it exits. While it joins the
    job, it waits as long for each answer.

    torchrun's c10d rendezvous waits as long for its store (`read_timeout`)."""
    etcd_ca: str = ""
    """File with the CA certificates for `https://` endpoints. Empty: the system's."""
    etcd_cert: str = ""
    """File with the agent's own certificate, if etcd requires a certificate from its clients."""
    etcd_key: str = ""
    """File with the private key that belongs to `etcd_cert`."""
    etcd_user: str = ""
    """User name, if etcd has authentication on. The common name of a certificate works, too, and saves etcd the password check (70 ms of a
    core)."""
    etcd_password_file: str = ""
    """File with the password of `etcd_user`, mode 600. Empty: the environment variable `MT_RESILIENT_ETCD_PASSWORD`."""

    def __post_init__(self) -> None:
        if self.deadline_s <= 0:
            raise UsageError(f"control.deadline_s is {self.deadline_s}; it must be more than 0")
        if self.join_wait_s < 0:
            raise UsageError(f"control.join_wait_s is {self.join_wait_s}; it must be 0 or more")
        for name in ("job", "node"):
            if not re.fullmatch(r"[\w.:@-]*", getattr(self, name), re.ASCII):
                raise UsageError(
                    f"control.{name} is {getattr(self, name)!r}; it may have the letters a to z, digits and any of _ . : @ -"
                )

        _ = self.labelled

    @property
    def labelled(self) -> dict[str, str]:
        """Return the labels by key. Raises UsageError if they are malformed."""
        known: dict[str, str] = {}
        for pair in filter(None, self.labels.split(",")):
            key, equals, value = pair.partition("=")
            if not (key and equals and value):
                raise UsageError(f"control.labels has {pair!r}; write KEY=VALUE, as rack=r1")
            if known.setdefault(key, value) != value:
                raise UsageError(f"control.labels has {key}={known[key]} and {key}={value}; write one of them")
        return known

    def papers(self) -> Papers:
        return Papers(self.etcd_ca, self.etcd_cert, self.etcd_key, self.etcd_user, self.etcd_password_file)


def alone(launch: Launch, control: ControlPolicy, nodes: NodesPolicy) -> bool:
    """Return whether torchrun trains on one node, however many nodes the scheduler gives, and no own option says otherwise."""
    return launch.alone and not (control.etcd or nodes.number or nodes.spares)


def placed(launch: Launch, control: ControlPolicy, nodes: NodesPolicy) -> tuple[ControlPolicy, NodesPolicy]:
    """Return both policies, completed with the values from a scheduler and torchrun's options. A job of one node does not get the
    scheduler's name for the job, because that name changes when the job is submitted again. Raises UsageError if the values contradict each
    other."""
    asked = scheduler_env.Place(node=control.node, nodes=nodes.number, spares=nodes.spares, job=control.job)
    here = scheduler_env.place(
        asked, replace(launch, alone=alone(launch, control, nodes)), os.environ, socket.gethostname()
    )
    several = max(sizes(here.nodes or "1")) > 1 or here.spares > 0
    job = here.job if several else control.job
    return replace(control, node=here.node, job=job), replace(nodes, number=here.nodes)


def counted(
    policy: NodesPolicy, control: ControlPolicy, agent: AgentPolicy, snapshots: str | None
) -> tuple[tuple[int, ...], int]:
    """Return the allowed numbers of nodes, and the number of spares. snapshots: the place that the user named; None: none. Raises
    UsageError if an option is missing that several nodes need."""
    asked = policy.number or "1"
    numbers = sizes(asked)
    if max(numbers) == 1 and not policy.spares:
        return numbers, 0
    wanted = {
        "--etcd HOST:PORT": control.etcd,
        "--job NAME": control.job,
        "--snapshots DIR|URL, a place that all of them reach": snapshots,
    }
    missing = [flag for flag, value in wanted.items() if not value]
    if missing:
        raise UsageError(
            f"several nodes ({asked}) need {formatting.listed(missing)}, the same on each node; nothing was started"
        )
    if agent.observe:
        raise UsageError("--observe watches one node; nothing was started. Leave it out, or train on one node")
    agent.bearable(max(numbers) + policy.spares)
    return numbers, policy.spares


def named(address: str) -> str:
    """Return this node's given address as an IP address, so that no agent has to resolve a name while ranks train. A name that resolves to
    a loopback address stays a name, because only this machine resolves it so (Debian's 127.0.1.1). Raises UsageError if it is not the
    address of one machine, MachineError if it is not this machine's."""
    try:
        family, *_, place = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        found = ip_address(place[0])
        if found.is_unspecified or found.is_multicast:
            raise UsageError(
                f"--address {address} does not name one machine; nothing was started. Give the address at which other nodes reach this one"
            )
        with socket.socket(family, socket.SOCK_DGRAM) as here:  # node rank 0's ranks and copies will listen there
            here.bind(place)
    except OSError as error:
        raise MachineError(
            f"--address {address}: {error.strerror or error}; nothing was started. Give the address at which other nodes reach this one"
        ) from error
    return address if found.is_loopback or "%" in str(found) else str(found)


def address(endpoints: Sequence[str]) -> str:
    """Return this node's address on the route to etcd, which is its address in the cluster's network. Try all endpoints, because the name
    of an etcd member that is down may not resolve. Raises MachineError."""
    why: OSError | None = None
    for endpoint in endpoints:
        etcd = parse_endpoint(endpoint)
        try:
            return address_towards(etcd.host, etcd.port)
        except OSError as error:
            why = error
    raise MachineError(
        f"this node's address on the way to {formatting.listed(endpoints)} cannot be found ({why}); name it with --address"
    )


def metrics_of_nodes(store: Store, keys: Keys) -> dict[str, str]:
    """Return the addresses of all nodes' metrics, by node. Raises StoreUnavailable."""
    found = {
        key.removeprefix(keys.nodes): loads(NodeRecord, entry.value) for key, entry in store.range(keys.nodes).items()
    }
    return {
        node: f"[{here.address}]:{here.metrics_port}" if ":" in here.address else f"{here.address}:{here.metrics_port}"
        for node, here in found.items()
        if here.metrics_port
    }


def one_cluster(store: EtcdStore, keys: Keys) -> None:
    """Raise UsageError if some endpoint belongs to another etcd cluster than the one where this agent has just registered. With endpoints
    of two clusters, some nodes would sooner or later use another cluster than the rest."""
    if others := store.elsewhere(keys.spec):
        raise UsageError(
            "--etcd names more than one cluster: the first endpoint knows this job, and "
            f"{formatting.listed(others)} does not; nothing was started. Name members of one etcd only"
        )


def endpoints(
    control: ControlPolicy, access: Access, run: RunDirectory, terminal: Terminal, closing: ExitStack
) -> tuple[EmbeddedEtcd | None, list[str]]:
    """Wait until one of the given endpoints answers, for at most `join_wait_s` seconds, and return (None, all of them). If no endpoints are
    given, start an own etcd, and return the server and its endpoint. Raises StoreUnavailable."""
    if control.etcd:
        given = control.etcd.split(",")
        silent = answered(given, access, control.deadline_s, control.join_wait_s, terminal)
        for reason in silent:  # an etcd member may be down
            terminal.say(
                f"{reason}; another endpoint answers, so the agent continues without this one", wall_s(), "warn"
            )
        return None, given
    server, endpoint = started(run, terminal, closing)
    closing.enter_context(server.naming_its_disk())
    return server, [endpoint]


def answered(
    given: Sequence[str], access: Access, deadline_s: float, wait_s: float, terminal: Terminal, *, quiet_s: float = 0.0
) -> list[StoreUnavailable]:
    """Wait until one of the given endpoints answers, for at most `wait_s` seconds. Tell the user about the wait once it takes `quiet_s`
    seconds. Return the errors of the endpoints that do not answer. Raises StoreUnavailable, and StoreRefused at once if an endpoint refuses
    this agent."""
    began_s, told = monotonic_s(), False
    while len(silent := _silent(given, deadline_s, access)) == len(given):
        waited_s = monotonic_s() - began_s
        if waited_s >= wait_s:
            raise silent[0]
        if not told and waited_s >= quiet_s:
            told = True
            terminal.say(f"{silent[0]}. Waiting for it, for at most {wait_s:.0f} s", wall_s(), "warn")
        sleep(AGAIN_S)
    return silent


def _silent(given: Sequence[str], deadline_s: float, access: Access) -> list[StoreUnavailable]:
    """Return the errors of the endpoints that do not answer. Raises StoreRefused if one refuses this agent."""
    found = []
    for endpoint in given:
        try:
            probe(endpoint, deadline_s, access)
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            found.append(error)
    return found
