"""The processes of one generation, on all nodes of the simulated job: who has come, who is gone, and what the others notice of it.

A step is done by all of them or by none: while a node is missing, dead or cut off, the others stand still where they are; or they raise, as
they do when the kernel closes the connections of a process that was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mt_resilient.agent.ranks.worker_group import Watched, WorkerGroup
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.generation import GenerationRecord
from mt_resilient.resilience.model.types import NodeId, RankPhase
from mt_resilient.resilience.text import formatting

if TYPE_CHECKING:
    from .cluster import Job
    from .node import Node

CLOSED = "RuntimeError: Connection closed by peer"
COLD = "cold: the warm process has not been started yet"


class Processes:
    def __init__(self, job: Job, record: GenerationRecord) -> None:
        self.job, self.record, self.generation = job, record, record.number
        self.nodes: dict[NodeId, Node] = {}
        """Those that have started theirs, in the order of node ranks."""
        self.pages: list[Page] = []
        """Of all of them, by global rank once all are there."""
        self.life = RankPhase.ABSENT
        self.closed = False
        """Connections to some of them are closed: the others raise."""

    def join(self, node: Node) -> None:
        node.group = WorkerGroup(self.generation, Watched(4000, -1), COLD)
        self.nodes = {
            n: node if n == node.name else self.nodes[n] for n in self.record.members if n in {*self.nodes, node.name}
        }
        self.pages = [page for each in self.nodes.values() for page in each.pages]
        for page in node.pages:
            page.clear(self.generation)
            page.until_ns = node.until_ns
            page.paused = int(self.record.waits)

    def leave(self, node: Node, closed: bool = True) -> None:
        """Its processes are gone. closed: the kernel that ran them could still say so."""
        if self.nodes.pop(node.name, None):
            self.pages = [page for each in self.nodes.values() for page in each.pages]
            self.closed |= closed and node.name not in self.job.cut.peers

    @property
    def group(self) -> WorkerGroup:
        """Of the first node."""
        group = next(iter(self.nodes.values())).group
        assert group
        return group

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        return [node.group for node in self.nodes.values() if node.group]

    @property
    def alive(self) -> bool:
        """Whether none of those that have started has ended."""
        return not any(g.launcher.ended_s or any(p.ended_s for p in g.ranks.values()) for g in self.worker_groups)

    @property
    def whole(self) -> bool:
        """Whether all ranks are there, alive, and reach each other."""
        together = len(self.nodes) == 1 or not self.job.cut.peers & self.nodes.keys()
        return self.alive and together and len(self.nodes) == len(self.record.members)

    def each(self) -> Iterator[tuple[int, Node, Page, Watched]]:
        """The attached ones, by global rank."""
        for node in self.nodes.values():
            assert node.group
            for local, process in sorted(node.group.ranks.items()):
                yield node.first_rank + local, node, node.pages[local], process

    def feel(self, now_s: float) -> bool:
        """What those that are left do about the others' end. Whether there is nothing that they could go on with."""
        if any(not g.launcher.ended_s and any(p.ended_s for p in g.ranks.values()) for g in self.worker_groups):
            self._launchers_end(now_s)
        elif self.closed:
            self._raise_closed(now_s - 0.5)
        if self.closed or not self.alive:
            return True
        self._attach(now_s)
        return not self.whole or self.unleased(now_s)

    def unleased(self, now_s: float) -> bool:
        """Whether some of them wait at a boundary, since others may have begun without their node."""
        return any(0 < page.until_ns < ns(now_s) for page in self.pages)

    def _launchers_end(self, now_s: float) -> None:
        ended = []
        for node, group in zip(self.nodes, self.worker_groups, strict=True):
            if not group.launcher.ended_s and any(p.ended_s for p in group.ranks.values()):
                group.launcher.ended_s, group.launcher.code = now_s + self.job.skew_s, 1
                ended.append(node)
        on = "" if self.job.alone else f" on {formatting.listed(ended)}"
        self.job.say(f"torchrun{on} {'sees it and ends' if len(ended) == 1 else 'see it and end'} with code 1")

    def _raise_closed(self, at_s: float) -> None:
        left = [(node, page, process) for _, node, page, process in self.each() if not process.ended_s]
        left = [each for each in left if each[0].name not in self.job.cut.peers]
        for _, page, process in left:
            page.say_farewell(error=CLOSED, traceback="")
            process.ended_s, process.code = at_s + self.job.skew_s + 0.01, 1
        if left:
            on = dict.fromkeys(node.name for node, *_ in left)
            self.job.say(f"the ranks on {formatting.listed([*on])} find their connections closed")

    def _attach(self, now_s: float) -> None:
        came = []
        for node in self.nodes.values():
            assert node.group
            if node.group.ranks:
                continue
            for local, page in enumerate(node.pages):
                rank = node.first_rank + local
                page.pid, page.rank, page.attached_ns = 5000 + rank, rank, ns(now_s)
                page.phase = RankPhase.ATTACHED
                node.group.ranks[local] = Watched(page.pid, -1)
            came.append(node.name)
        if came:
            whose = "both" if len(self.pages) == 2 else "all"
            self.job.say(
                f"{whose} ranks are attached"
                if self.job.alone
                else f"the ranks on {formatting.listed(came)} are attached"
            )

    # -- how they end ---------------------------------------------------------------------------------------------------------

    def kill(self, rank: int, now_s: float) -> None:
        """SIGKILL for one of them; its peers find the connection closed. On other nodes they may hang instead."""
        struck, wall_s = next(r for r in self.each() if r[0] == rank), now_s + self.job.skew_s
        started = struck[2].step >= 0
        where = "" if self.job.alone else f" on {struck[1].name}"
        self.job.say(
            f"rank {rank}{where} is killed {f'after step {struck[2].step}' if started else 'before its first step'}"
        )
        struck[3].ended_s, struck[3].code = wall_s, -9
        for _, node, page, process in self.each():
            if not process.ended_s and (node is struck[1] or not self.job.faults.peers_hang):
                page.say_farewell(error=CLOSED, traceback="")
                process.ended_s, process.code = wall_s + 0.01, 1

    def kill_all(self, now_s: float) -> None:
        """SIGKILL for the launcher; its ranks die with it. Of several, for the first node's."""
        node = next(iter(self.nodes.values()))
        assert node.group
        where = "" if self.job.alone else f" on {node.name}"
        self.job.say(f"torchrun{where} is killed, and its ranks with it")
        for process in (node.group.launcher, *node.group.ranks.values()):
            if not process.ended_s:
                process.ended_s, process.code = now_s + self.job.skew_s, -9
        self.closed |= not self.job.alone and not self.job.faults.peers_hang

    def raise_(self, error: str, now_s: float, on: Node | None = None, **words: Any) -> None:
        """An exception on all of them; or on one node, whose peers find their connections closed."""
        self.job.say(f"the ranks{'' if on is None or self.job.alone else f' on {on.name}'} raise {error}")
        for rank, node, page, process in self.each():
            own = on is None or node is on
            said = (
                {"error": error, "traceback": f"Traceback\n{error}", **words}
                if own
                else {"error": CLOSED, "traceback": ""}
            )
            page.say_farewell(**said)
            process.ended_s, process.code = now_s + self.job.skew_s + 0.01 * rank + (0.0 if own else 0.1), 1


def ns(seconds: float) -> int:
    return round(seconds * 1e9)
