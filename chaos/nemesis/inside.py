"""Faults inside a rank, which the injector there carries out (`chaos/rank/injector.py`)."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from ..judgement.plan import Injection
from ..live.job import Job, NotThere
from ..rank import injector
from .registry import Done, Fault, fault

_TAKEN_S = 60.0
_STARTS = 2


def _order(job: Job, name: str, text: str) -> Path:
    order = job.orders / name
    order.with_suffix(".taken").unlink(missing_ok=True)
    fresh = order.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(order)
    return order


def _inside(name: str, function: Any) -> Fault:
    def strike(job: Job, injection: Injection) -> Done:
        order = _order(job, f"rank-{injection.rank}", name)
        if not job.until(lambda: not order.exists() or job.agent.poll() is not None, _TAKEN_S) or order.exists():
            order.unlink(missing_ok=True)
            raise NotThere(f"rank {injection.rank} made no optimizer step within {_TAKEN_S:.0f} s")
        return Done(did=f"in rank {injection.rank}: {name.replace('_', ' ')}")

    strike.__name__, strike.__doc__ = name, function.__doc__
    return strike


for _name, _function in injector.FAULTS.items():
    fault(of_a_rank=True, seeded=not _name.startswith("bit_"))(_inside(_name, _function))


@fault(of_a_rank=True)
def start_fails(job: Job, injection: Injection) -> Done:
    """A rank is killed, and the script's next two starts fail with an ImportError, as with a file server that is away."""
    _order(job, f"{injector.STARTS}-{injection.rank}", str(_STARTS))
    job.rank(injection.rank).send_signal(signal.SIGKILL)
    return Done(did=f"SIGKILL to rank {injection.rank}, and its next {_STARTS} starts fail with an ImportError")
