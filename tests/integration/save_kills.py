"""Kills a job that saves without a pause, again and again: the program behind `test_save_kills.py`.

    python save_kills.py ROOT SEED KILLS BYTES MB_PER_S

At a random moment one of `saving_job.py`'s processes is killed: a rank, the drain process, or the agent and, by their leashes, all of
them; or, twice running, a rank whose peer has sealed and which has not. After each kill the newest snapshot on disk must be sound, and
hold one step whose bytes are those that (rank, step, seed) decide; the job says the same of what its next ranks went back to. One line
of JSON at the end says what was hit. MB_PER_S: a limit so high that it is none makes every slab the direct stream's; 0 leaves the
choice to the drain process, for which small slabs are tensorstore's.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
from saving_job import RANKS, Agent, Fork, held

from mt_resilient.checkpoint.backend import paths
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.backend.paths import Attempt
from mt_resilient.checkpoint.durable import catalog, commit
from mt_resilient.resilience.ipc import die_with_parent

PATIENCE_S = 60.0
"""The longest wait seen was 17 s: on two cores, with a load of 20, and writers that kept the disk busy."""
WINDOW_S = 0.05
"""After a snapshot has become durable, within which the kill comes."""
TARGETS = ("rank", "rank", "rank, half sealed", "drain", "drain", "agent")


class Campaign:
    def __init__(self, root: Path, seed: int, nbytes: int, mb_per_s: float) -> None:
        self._root, self._seed, self._nbytes, self._mb_per_s = root, seed, nbytes, mb_per_s
        (Files(root) / paths.SNAPSHOTS).write(paths.JOB, b"")  # as the agent does before it starts a drain process
        self._lives = 0
        self._agent: Fork | None = None
        self._pids: dict[str, Any] = {}
        self._said: deque[dict[str, Any]] = deque()
        self._torn_ones: set[Attempt] = set()
        self.chance = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()

    def kill_one(self) -> None:
        if self._agent is None:
            self._lives += 1
            self._agent = Fork(self._be_agent)
        self._agent.tell(go=True)
        self._until("going")
        self._until("durable")
        time.sleep(self.chance.random() * WINDOW_S)
        target = self.chance.choice(TARGETS)
        self.kills[target] += 1
        match target:
            case "agent":
                torn = bool(self._kill_agent())
            case "drain":  # nothing newer comes: its successor takes up the very snapshot that it was at
                newest = self._hold()
                time.sleep(self.chance.random() * WINDOW_S)
                os.kill(self._pids["drain"], signal.SIGKILL)
                steps = self._torn()
                self.hits["drain, taken up again"] += newest in steps
                torn = bool(steps)
                self._until("drained anew")
                self._until_drained(newest)
            case "rank":
                torn = self._kill_rank(self.chance.choice(self._pids["ranks"]))
                self._until_drained(self._hold())
            case _:  # twice: were what it had staged not sealed then, it would have no slot left
                torn = True
                self.kills[target] += 1
                self._agent.tell(go=True, halves=2)
                for _ in range(2):
                    self._until("half sealed")
                    self._kill_rank(self._pids["ranks"][-1])
                self._until_drained(self._hold())
        self.hits[target] += torn
        self.check()

    def _be_agent(self, heard: int, said: int) -> None:
        """In the child, whose the arena is."""
        Agent(self._root, self._seed, self._nbytes, self._mb_per_s, self._lives).run(heard, said)

    def check(self) -> None:
        newest, *_ = catalog.committed(Files(self._root))
        steps = {held(newest, rank, self._seed, self._nbytes) for rank in range(RANKS)}
        assert steps == {Attempt.parse(newest.name).stamp.step}, (newest, steps)

    def end(self) -> None:
        self._kill_agent()
        self.check()

    def _hold(self) -> int:
        """The newest sealed step: none comes after it until the agent is told to go."""
        assert self._agent is not None
        self._agent.tell(go=False)
        return self._until("held")["step"]

    def _until_drained(self, step: int) -> None:
        """Nothing that was killed can keep the newest sealed step from getting to disk."""
        until_s = time.monotonic() + PATIENCE_S
        while not any(attempt.stamp.step == step for attempt in catalog.look(Files(self._root)).durable):
            assert time.monotonic() < until_s, f"step {step} does not get to disk"
            time.sleep(0.005)

    def _kill_rank(self, pid: int) -> bool:
        """Whether it, or its peer, was amid staging. On return the next ranks have gone back."""
        os.kill(pid, signal.SIGKILL)
        torn = self._until("born")["torn"]
        self._until("back")
        return torn

    def _kill_agent(self) -> set[int]:
        if self._agent is None:
            return set()
        self._agent.kill()
        self._agent = None
        self._said.clear()
        for pid in (self._pids["drain"], *self._pids["ranks"]):
            os.waitpid(pid, 0)  # ours now, and killed by its leash
        return self._torn()

    def _torn(self) -> set[int]:
        """The steps of writes that have begun and not ended since the last look. The drain process is dead."""
        there = [attempt for path in (self._root / paths.SNAPSHOTS).iterdir() if (attempt := Attempt.parse(path.name))]
        torn = {attempt for attempt in there if not commit.committed(attempt.under(Files(self._root)))}
        known, self._torn_ones = self._torn_ones, torn
        return {attempt.stamp.step for attempt in torn - known}

    def _until(self, *events: str) -> dict[str, Any]:
        """When all of `events` have been said, what was said with them. What was said before is over."""
        assert self._agent is not None
        missing, found = set(events), {}
        until_s = time.monotonic() + PATIENCE_S
        while missing:
            while not self._said:
                left_s = max(0.0, until_s - time.monotonic())
                assert select.select([self._agent.fd], [], [], left_s)[0], f"nothing of {missing} was said"
                heard = self._agent.hear()
                assert heard is not None, "the agent ended"
                self._said += heard
            said = self._said.popleft()
            self._pids = said["pids"]
            assert said["event"] != "wrong", said
            if said["event"] in missing:
                missing.remove(said["event"])
                found |= said
        return found


def main() -> None:
    root, seed, kills, nbytes, mb_per_s = Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5])
    torch.set_num_threads(1)  # no threads: this process forks
    die_with_parent.adopt_orphans()
    campaign = Campaign(root, seed, nbytes, mb_per_s)
    while campaign.kills.total() < kills:
        campaign.kill_one()
    campaign.end()
    print(json.dumps({"kills": campaign.kills, "hits": campaign.hits}))


if __name__ == "__main__":
    main()
