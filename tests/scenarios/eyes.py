"""What the agent of the simulated node sees of its ranks when it looks at them: stacks as faulthandler writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mt_resilient.agent.ranks.worker_group import Watched
from mt_resilient.resilience.detect.hang_rules import Look
from mt_resilient.resilience.detect.stack_traces import locate, parse
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.model.types import RankPhase

if TYPE_CHECKING:
    from .node import Node

TORCH = "/env/lib/python3.11/site-packages/torch"
WAITS = f"""Current thread 0x0000000000000001 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "{TORCH}/distributed/c10d_logger.py", line 81 in wrapper
  File "/job/train.py", line 31 in main
"""
READS = """Current thread 0x0000000000000001 (most recent call first):
  File "/job/data.py", line 12 in read
  File "/job/train.py", line 29 in main
"""
ENDS = f"""Current thread 0x0000000000000001 (most recent call first):
  File "{TORCH}/distributed/distributed_c10d.py", line 2200 in destroy_process_group
  File "/job/train.py", line 50 in main
"""


class Eyes:
    def __init__(self, node: Node) -> None:
        self._node = node

    def ask(self, local_rank: int, page: Page, process: Watched) -> None:
        pass

    def take(self, local_rank: int, page: Page, process: Watched, now_s: float) -> Look:
        ranks = self._node.ranks
        assert ranks
        slow = self._node.first_rank + local_rank == 1 and ranks.whole
        busy = bool(ranks.busy_s) and slow
        text = ENDS if page.phase == RankPhase.FINISHED else READS if slow else WAITS
        stack = parse(text)[1]
        return Look(at_s=now_s, state="R" if busy else "S", cpu_s=now_s * busy, stack=stack, spot=locate(stack))

    def keep(self, name: str, looks: Mapping[int, Look]) -> str:
        return f"logs/stacks-{name}.txt"
