"""Simulate agents for `control_plane.py`: one process sends etcd what many agents would send, and does none of their other work.

    python crowd.py ENDPOINT FIRST COUNT NODES CONNECTIONS

The process simulates COUNT agents from FIRST on, of a job of NODES nodes, spread evenly over CONNECTIONS connections. Each agent has a
lease and renews it on its connection's stream. It writes its status as often as `write_rates.pace` says. When the job's record changes,
each agent writes that it is ready or running, and its status. The process prints `ready` when all agents are registered, and exits when its
standard input ends.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from mt_resilient.resilience.detect.node_divergence import KEPT
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.node import Ack, AckKind, Copy, NodeRecord, NodeStatus
from mt_resilient.resilience.model.signals import Held
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.model.types import Generation, NodeId, Step
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.etcd.messages import interval_fields, method, operation_fields
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.protocol import Put
from mt_resilient.resilience.store.write_rates import jittered, pace

KEYS = Keys("bench")
AT_ONCE = 16
"""The most concurrent calls on one connection."""
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))


def name_of(number: int) -> NodeId:
    return NodeId(f"node-{number:05d}")


def instance_of(number: int) -> str:
    return f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}"


def status(generation: int, nodes: int, **more: Any) -> NodeStatus:
    """Return the status of one of `nodes` nodes, with eight ranks that train. Each generation has a higher step than the previous one."""
    step, now = Step(100 * generation), time.time()
    marks = {f"{mark}_s": now for mark in ("attached", "built", "restored", "stepped", "replayed")}
    said: dict[str, Any] = {
        "at_s": now,
        "min_step": step,
        "max_step": step,
        "alive": 8,
        "pids": (4321,) * 8,
        "launch": "warm",
    }
    course = {"generation": Generation(generation), "rewinds": 0}
    said |= {"courses": ((generation, 0),), "copies": (Copy(node_rank=0, nodes=nodes, step=step, **course),)}
    words = {(generation, 0, step - 30 * n): hash((generation, n)) % 2**48 for n in range(KEPT)}
    said |= {"held": str(Held(model="5eed5eed5eed", words=words))}
    said |= {"memory_steps": (step,), "durable_steps": (Step(step - 50),), "agreed_steps": (step,), **marks, **more}
    return NodeStatus(generation=Generation(generation), **said)


@dataclass
class Agent:
    number: int
    line: Line
    lease: int = 0
    renewal: bytes = b""


@dataclass
class Line:
    """One connection to etcd, as a relay or an agent has."""

    channel: grpc.aio.Channel
    agents: list[Agent] = field(default_factory=list)
    renewals: Any = None

    def __post_init__(self) -> None:
        self.gate = asyncio.Semaphore(AT_ONCE)
        self.calls: dict[str, Any] = {}

    async def ask(self, service: str, name: str, **fields: Any) -> Any:
        rpc = method(service, name)
        if name not in self.calls:
            self.calls[name] = self.channel.unary_unary(rpc.path, response_deserializer=rpc.response.FromString)
        while True:
            async with self.gate:
                with suppress(grpc.aio.AioRpcError):  # too busy: try again later, as an agent does in its next round
                    return await self.calls[name](rpc.request(**fields).SerializeToString(), timeout=20.0)
            await asyncio.sleep(random.random())

    async def put(self, key: str, record: Any, lease: int = 0) -> None:
        await self.ask("KV", "Put", key=key.encode(), value=dumps(record), lease=lease)


class Crowd:
    def __init__(self, endpoint: str, first: int, count: int, nodes: int, connections: int) -> None:
        self.nodes, self.pace = nodes, pace(nodes)
        self.lines = [Line(grpc.aio.insecure_channel(endpoint, options=OPTIONS)) for _ in range(connections)]
        self.agents = [Agent(number, self.lines[number % connections]) for number in range(first, first + count)]
        for agent in self.agents:
            agent.line.agents.append(agent)
        self.record: tuple[int, GenerationRecord | None] = (0, None)
        self.generation = 0
        self.entering = asyncio.Semaphore(4 * AT_ONCE)
        self.running: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        await asyncio.gather(*map(self._register, self.agents))
        for line in self.lines:
            self._start(self._renew(line))
            self._start(self._watch(line))
        print("ready", flush=True)
        self._start(self._repeat())
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)

    def _start(self, doing: Any) -> None:
        task = asyncio.ensure_future(doing)
        self.running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"a simulated agent has failed: {task.exception()!r}", file=sys.stderr, flush=True)
            os._exit(1)  # otherwise the results would be those of fewer agents

    async def _register(self, agent: Agent) -> None:
        # The first lease is long, because ten thousand registrations take longer than a lease.
        await self.entering.acquire()
        agent.lease = (await agent.line.ask("Lease", "LeaseGrant", TTL=self.pace.lease_ttl_s + 60)).ID
        agent.renewal = method("Lease", "LeaseKeepAlive").request(ID=agent.lease).SerializeToString()
        name = name_of(agent.number)
        known = NodeRecord(instance=instance_of(agent.number), host=name, pid=4321, ranks=8)
        await agent.line.put(KEYS.status(name), status(0, self.nodes))
        await agent.line.put(KEYS.node(name), known, agent.lease)
        self.entering.release()

    async def _repeat(self) -> None:
        """Send each renewal and status when it is due."""
        now = time.monotonic()
        due = [(now + random.random() * self.pace.keepalive_s, agent.number, True, agent) for agent in self.agents]
        due += [(now + random.random() * self.pace.status_s, agent.number, False, agent) for agent in self.agents]
        heapq.heapify(due)
        while True:
            at, number, renews, agent = due[0]
            wait_s = at - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            period_s = self.pace.keepalive_s if renews else self.pace.status_s
            heapq.heapreplace(due, (at + jittered(period_s, random.random()), number, renews, agent))
            if renews and agent.line.renewals is not None:
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream is being opened again
                    await agent.line.renewals.write(agent.renewal)
            elif not renews:
                self._start(agent.line.put(KEYS.status(name_of(number)), status(self.generation, self.nodes)))

    async def _renew(self, line: Line) -> None:
        while True:
            line.renewals = line.channel.stream_stream(method("Lease", "LeaseKeepAlive").path)()
            with suppress(grpc.aio.AioRpcError):
                async for _ in line.renewals:
                    pass
            await asyncio.sleep(random.random())

    async def _watch(self, line: Line) -> None:
        rpc = method("Watch", "Watch")
        stream = line.channel.stream_stream(
            rpc.path, request_serializer=rpc.request.SerializeToString, response_deserializer=rpc.response.FromString
        )()
        await stream.write(rpc.request(create_request=interval_fields(KEYS.generation)))
        async for heard in stream:
            for event in heard.events:
                revision = event.kv.mod_revision
                if revision > self.record[0]:  # each real agent parses the record, but here one parse serves all
                    self.record = (revision, loads(GenerationRecord, event.kv.value))
                record = self.record[1]
                if record and revision == self.record[0]:
                    self.generation = record.number
                    for agent in line.agents:
                        self._start(self._obey(agent, record))

    async def _obey(self, agent: Agent, record: GenerationRecord) -> None:
        kind = {Phase.GATHER: AckKind.READY, Phase.LAUNCH: AckKind.RUNNING}.get(record.phase)
        if kind is None:
            return
        name = name_of(agent.number)
        said = Ack(
            kind=kind, generation=record.number, instance=instance_of(agent.number), at_s=time.time(), port=29500
        )
        how = Put(KEYS.status(name), dumps(status(record.number, self.nodes)))
        puts = [how, Put(KEYS.ack(record.number, name), dumps(said))]
        await agent.line.ask("KV", "Txn", success=[*map(operation_fields, puts)])


if __name__ == "__main__":
    endpoint, *numbers = sys.argv[1:]

    async def live() -> None:
        await Crowd(endpoint, *map(int, numbers)).live()

    asyncio.run(live())
