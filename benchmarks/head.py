"""The leader for `control_plane.py`: the real controller on the real store, called as the agent's loop calls it.

    python head.py ENDPOINT

The script prints a line of JSON for each tick and for each record that the controller writes. It exits when its standard input ends.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress

from crowd import KEYS

from mt_resilient.agent.loop.gc_tuning import search_seldom
from mt_resilient.agent.loop.supervisor import BUSY_REST_S, QUICK_S, REST_S, RESTS
from mt_resilient.resilience.controller import Controller
from mt_resilient.resilience.decide.policy import Policy
from mt_resilient.resilience.errors import StoreUnavailable
from mt_resilient.resilience.model.generation import Decision
from mt_resilient.resilience.model.state_machine import Phase
from mt_resilient.resilience.store.election import Election
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.poll import readable

AT_MOST_S = 1.0
"""The most seconds between two rounds of the agent's loop while no event arrives."""


def told(decision: Decision) -> None:
    if decision.record:
        number, phase = decision.record.number, decision.record.phase
        print(json.dumps({"record": number, "phase": phase, "at_s": time.time()}), flush=True)


def main() -> None:
    search_seldom()
    store = EtcdStore([sys.argv[1]], deadline_s=20.0)
    lease = store.grant(60)
    controller = Controller(store, KEYS, Election(store, KEYS.leader, "head"), Policy(), told)
    renewed_s = time.monotonic()
    heard = False
    while True:
        if 0 in readable((0, *controller.fds()), 0 if heard else AT_MOST_S):
            return
        began_s, heard = time.monotonic(), False
        with suppress(StoreUnavailable):  # this round is skipped
            more = True
            while more:
                begin_s = time.thread_time()
                more = controller.tick(lease, time.time())
                print(json.dumps({"tick_s": time.thread_time() - begin_s}), flush=True)
            if began_s - renewed_s > 10.0:
                store.keepalive(lease)
                renewed_s = began_s
        record = controller.record()
        busy = record is None or record.phase not in (Phase.RUN, Phase.LAUNCH)
        rest_s = min(BUSY_REST_S if busy else REST_S, RESTS * (time.monotonic() - began_s))
        rest_until_s = time.monotonic() + rest_s
        time.sleep(QUICK_S)
        while time.monotonic() < rest_until_s:
            with suppress(StoreUnavailable):
                heard = controller.hear(time.time()) or heard
            time.sleep(QUICK_S)


if __name__ == "__main__":
    main()
