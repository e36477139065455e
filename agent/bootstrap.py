"""Creates the objects of one agent (run directory, etcd, store, node, supervisor), runs it, and closes them."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

from ..checkpoint.backend import paths
from ..checkpoint.backend import place as stores
from ..checkpoint.backend.filesystem import Files
from ..checkpoint.backend.place import Place
from ..checkpoint.durable import catalog, commit
from ..checkpoint.durable.save_interval import SnapshotPolicy
from ..resilience.clock import monotonic_s, wall_s
from ..resilience.config import changed
from ..resilience.controller import Controller
from ..resilience.decide import observe_only
from ..resilience.decide.policy import Policy
from ..resilience.errors import MachineError, SnapshotError, UsageError
from ..resilience.inprocess.tally import RankPolicy
from ..resilience.ipc.process_title import show_instead
from ..resilience.model.data_windows import Window, merged
from ..resilience.model.types import NodeId
from ..resilience.report.metrics import Metrics
from ..resilience.store.election import Election
from ..resilience.store.etcd.access import PASSWORD
from ..resilience.store.etcd.client import EtcdStore
from ..resilience.store.keys import Keys
from ..resilience.store.seat import Seat
from ..resilience.store.write_rates import paced
from ..resilience.text import formatting
from . import shared_run
from .config import AgentPolicy
from .etcd.revival import Revival
from .join import identity, other_jobs
from .join.config_match import alike
from .join.exit_report import AT_THE_END_S, leave_soon, say_the_end, through, unwritten
from .join.join import Joined, Places, join
from .join.registration import await_others, described
from .join.static_nodes import Placed, serve
from .launch import python_check, rank_count
from .launch.torchrun import Launch
from .loop.executor import Performer
from .loop.gc_tuning import search_seldom
from .loop.peer_duties import Company
from .loop.shutdown import Leaving, hear_early, unheard
from .loop.status_publisher import PACE_S, Publisher
from .loop.store_outage import Outage
from .loop.supervisor import Duties, Supervisor
from .node import Node
from .output.async_output import Notebook
from .output.event_log import Telling
from .output.hooks import Hooks
from .output.terminal import Terminal
from .peers.lease import Heartbeat
from .policies import NodePolicies, at_least
from .preflight import kernel_features
from .run_choice import take_one
from .run_directory import RunDirectory, command_again


def run_job(
    command: Sequence[str],
    placed: Placed,
    choose: Callable[[Collection[Path]], Path],
    snapshots: str | None,
    origin: str | None,
    windows: Sequence[Window],
    policies: Mapping[str, Any],
    terminal: Terminal,
) -> int:
    """Run `command` to its end, through all faults, and return the exit code. Raises ResilientError if the job cannot start; then none of
    its processes runs. choose: returns a run directory; its argument lists those that other agents have locked. snapshots: a path or a URL
    (`place.address`); None: the run directory. origin: a job whose newest snapshot the ranks start from. windows: batches of data that are
    skipped."""
    search_seldom()
    hear_early(policies["preemption"])
    control, nodes, found = placed.control, placed.nodes, placed.found
    launch = rank_count.counted(python_check.checked(placed.launch, os.environ), os.environ)
    show_instead(command, launch.shown(command))
    whole, run = take_one(choose, placed.below, lambda sentence: terminal.say(sentence, wall_s(), "warn"))
    snapshots = snapshots or (str(whole.absolute()) if found else None)
    with ExitStack() as closing:
        closing.callback(run.release)
        kept: SnapshotPolicy = policies["snapshots"]
        root = stores.at(stores.address(snapshots or str(run.root), kept.endpoint, kept.region))
        agent: AgentPolicy = policies["agent"]
        beginning = None
        seen = (
            catalog.look(root) if origin and not agent.observe else None
        )  # when observing, no own snapshot is restored
        if origin and not (seen and (seen.durable or seen.unread)):
            beginning = _begun_from(origin, kept)
        if beginning:  # all ranks read it at each restart; the job that wrote it must not delete it meanwhile
            closing.enter_context(beginning.reading(paths.COMMIT))
        numbers, spares = identity.counted(nodes, control, agent, snapshots)
        refused = kernel_features.check()
        arguments = None if agent.changed_arguments else described(launch, ()).command
        heir = bool(found) and shared_run.heir(whole, run, control.job, arguments, closing)
        run.own(root / paths.SNAPSHOTS, control.job, whole.absolute() if heir else None)
        # This refuses a snapshot from another version of the program. A rank finds and reports a damaged or unreadable one.
        for chosen in [beginning] if beginning else catalog.committed(root)[:1]:
            with suppress(SnapshotError, MachineError):
                commit.read_commit(chosen)
        journal = Notebook(run.journal)
        closing.callback(journal.finish)
        access = control.papers().access(os.environ)
        os.environ.pop(PASSWORD, None)  # ranks must not get the password
        if found:
            server, endpoints = serve(found, run, access, terminal, closing)
        else:
            server, endpoints = identity.endpoints(control, access, run, terminal, closing)
        store = EtcdStore(endpoints, deadline_s=control.deadline_s, access=access)
        closing.callback(store.close)
        keys = Keys(control.job or (run.job if server else f"{run.job}-{run.identity}"))
        launch = replace(launch, hash_seed=crc32(keys.job.encode()) or 1)
        metrics = Metrics(keys.job, control.node)
        metrics.disks({"run directory": run.root} | ({"snapshots": root.path} if isinstance(root, Files) else {}))
        port = _serve(metrics, agent.metrics_port, terminal)
        metrics.nodes = lambda: identity.metrics_of_nodes(store, keys)
        if server and not found and (double := other_jobs.namesake(port, keys.job)):
            terminal.say(double, wall_s())
        hooks = Hooks(policies["hooks"], run.root, keys.job, control.node)
        closing.callback(hooks.finish)
        telling = Telling(terminal, journal, metrics, hooks.tell)
        seat = Seat(store, keys, NodeId(control.node))
        spec = described(launch, numbers, spares, alike(policies, windows, origin, version("mt-resilient")))
        places = Places(endpoints, root, run, port, hosts_etcd=bool(found and server))
        joined = join(seat, launch, spec, control, places, policies, telling, closing)
        if joined.done:
            return _nothing_left(keys.job, run, telling)
        identity.one_cluster(store, keys)
        begun = {
            "command": list(command),
            "again": command_again(),
            "arguments": list(spec.command),
            "snapshots": root.address,
            "pid": os.getpid(),
            "invocation": placed.invocation,
            "several": joined.neighbour is not None,
            "configuration": changed(policies),
            "versions": python_check.versions(),
        }
        journal.write("start", wall_s(), **begun)
        run.publish(keys.job, endpoints, control.papers(), port)
        deciding = Policy(
            recovery=at_least(policies["recovery"], launch.max_restarts),
            ladder=policies["ladder"],
            nodes=policies["nodes"],
            quarantine=policies["quarantine"],
            observe=agent.observe,
        )
        judged_by = RankPolicy(
            spikes=policies["spikes"], ladder=policies["ladder"], rescue=policies["rescue"], observe=agent.observe
        )
        chosen_by = NodePolicies(
            snapshots=kept,
            ranks=judged_by,
            hang=policies["hang"],
            stability=policies["stability"],
            stragglers=policies["stragglers"],
            rank_log_mb=agent.rank_log_mb,
            window_h=policies["recovery"].mismatch_window_h,
        )
        life = joined.spec.run or secrets.token_hex(4)
        left_out = merged((*windows, *joined.spec.windows))
        launch = replace(launch, layouts=joined.spec.layouts)
        node = Node(launch, run, root, chosen_by, life, beginning, left_out, joined.copies)
        closing.callback(node.output.finish)
        closing.callback(node.close)
        hooks.pids.update((server.pid or 0,) if server else ())
        node.spared = hooks.pids
        mend = Revival(server, endpoints[0], node.spared, telling.say) if server else None
        cause = server.cramped if server else str
        outage = Outage(node, telling, mend, cause, seat, joined.spec, joined.token, bool(found and not server))
        supervisor = _supervisor(seat, joined, node, deciding, policies, telling, outage)
        closing.callback(supervisor.heartbeat.end)
        ranks = formatting.count(launch.ranks, "rank")
        if beginning:
            terminal.say(f"the ranks start from the snapshot {beginning}", wall_s())
        where = f"{ranks} on this node, {seat.node}" if max(joined.spec.sizes) > 1 else ranks
        terminal.say(f"job {keys.job}: {where}, everything about it in {run.root}", wall_s())
        _warn(launch, max(joined.spec.sizes), supervisor.telling)
        if node.vitals.introduction:
            journal.write("said", wall_s(), sentence=node.vitals.introduction, mood="info")
        for sentence in refused:
            supervisor.telling.say(sentence, "warn")
        if deaf := unheard(policies["preemption"]):
            supervisor.telling.say(deaf, "warn")
        if agent.observe:
            supervisor.telling.say(observe_only.INTRODUCTION)
        code = supervisor.run()
        record, lost = supervisor.record, ""
        asked = record is not None and record.last_snapshot
        drained = record is not None and not record.over and supervisor.heartbeat.instance in record.dismissed
        if ((code == 0 and not agent.observe) or asked) and not drained:
            node.held.shelf.fresh(AT_THE_END_S)
            steps = node.held.durable_steps() + ([] if asked else node.held.live_steps())
            lost = unwritten(node.board.pages, steps, node.drain.lost, asked)
        if lost and code == 0 and not (node.board.unsavable() and not asked):
            code = MachineError.exit_code  # a person can fix the cause
        newest = max(node.held.durable_steps(), default=None)
        say_the_end(code, record, lost, newest, run, supervisor.telling, drained, through(node.board.pages))
        if found and server:
            await_others(seat)
        journal.write("end", wall_s(), code=code)
        leave_soon(code, run.leaving)
        return code


def _warn(launch: Launch, nodes: int, telling: Telling) -> None:
    """Report what the launch may do otherwise than the user expects."""
    if launch.torn_groups and nodes > 1:
        telling.say(launch.torn(), "warn")
    if not launch.hooked:
        telling.say(f"{launch.warm_refused}: ranks run as under torchrun alone, unwatched", "warn")
    if launch.own_programs:
        telling.say(f"{launch.warm_refused}. A rank is watched from the moment its training loop or Session begins")


def _nothing_left(job: str, run: RunDirectory, telling: Telling) -> int:
    """Report that the job is already finished. Return 0, so that the scheduler that restarted this node does not do so again."""
    run.finished.touch()
    telling.say(
        f"the job {job} is finished: there is nothing to do here. To train anew, give it another name with --job, and other places "
        "with --run-dir and --snapshots",
        "good",
    )
    return 0


def _begun_from(origin: str, kept: SnapshotPolicy) -> Place:
    """Return the newest snapshot of another job. origin: that job's run directory, or the place that holds its `snapshots/`. Raises
    UsageError if the job has no committed snapshot."""
    address = stores.address(origin, kept.endpoint, kept.region) if "://" in origin else ""
    root = stores.at(address) if address else RunDirectory(Path(origin)).kept()
    found = catalog.committed(root)
    if not found:
        raise UsageError(f"--start-from {origin}: there is no committed snapshot under {root}; nothing was started")
    return found[0]


def _serve(metrics: Metrics, wished: int, terminal: Terminal) -> int:
    port = metrics.serve(*((*other_jobs.PORTS, 0) if wished == AgentPolicy.metrics_port else (wished,)))
    taken = f" (port {wished} is taken)" if port != wished != 0 else ""
    terminal.say(f"metrics on http://localhost:{port}/metrics{taken}", wall_s())
    metrics.others = other_jobs.OtherJobs(port)
    return port


def _supervisor(
    seat: Seat,
    joined: Joined,
    node: Node,
    deciding: Policy,
    policies: Mapping[str, Any],
    telling: Telling,
    outage: Outage,
) -> Supervisor:
    me, spec, neighbour = joined.me, joined.spec, joined.neighbour
    policy: AgentPolicy = policies["agent"]
    nodes = spec.nodes
    ttl_s = policy.lease_s(nodes)
    heartbeat = Heartbeat(seat, me, ttl_s, random.random)
    node.orphans.meanwhile = lambda: heartbeat.keep(monotonic_s())
    election = Election(seat.store, seat.keys.leader, me.instance)
    controller = Controller(seat.store, seat.keys, election, replace(deciding, lease_s=ttl_s), telling.decided)
    company = Company(seat, heartbeat, neighbour, node, telling, spec) if neighbour else None
    pace_s = paced(nodes, ttl_s).status_s if neighbour else min(PACE_S, ttl_s / 4)
    publisher = Publisher(seat, me.instance, node, company, telling, pace_s)
    performer = Performer(
        seat=seat,
        instance=me.instance,
        node=node,
        policy=policy,
        telling=telling,
        publisher=publisher,
    )
    leaving = Leaving(seat, me.instance, neighbour is not None, node, policy, policies["preemption"], telling)
    return Supervisor(
        seat=seat,
        node=node,
        heartbeat=heartbeat,
        controller=controller,
        policy=policy,
        telling=telling,
        duties=Duties(publisher=publisher, performer=performer, leaving=leaving, outage=outage, company=company),
        over=joined.over,
    )
