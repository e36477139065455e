"""Faults inside a rank, which the injector there carries out (`chaos/rank/injector.py`)."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..judgement.plan import Injection
from ..live.agent import NotThere
from ..live.job import Job
from ..rank import injector
from .registry import Done, Fault, fault

_TAKEN_S = 60.0
_STARTS = 2
_SKIPS_DATA = 2
"""`Page.tells` of a loop that can leave data out."""


def _order(job: Job, name: str, text: str) -> Path:
    order = job.orders / name
    order.with_suffix(".taken").unlink(missing_ok=True)
    fresh = order.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(order)
    return order


def _inside(name: str, function: Any) -> Fault:
    def strike(job: Job, injection: Injection) -> Done:
        if name == injector.SPIKE:
            told = [page.tells for agent in job.agents for page in agent.pages() if page.pid]
            if not told or {*told} != {_SKIPS_DATA}:
                raise NotThere("this script cannot leave data out (docs/data.md)")
            injection = replace(injection, rank=0)  # rank 0 chooses the batch, and all ranks use it
        order = _order(job, f"rank-{injection.rank}", name)
        if not job.until(lambda: not order.exists() or not job.goes_on(), _TAKEN_S) or order.exists():
            order.unlink(missing_ok=True)
            raise NotThere(f"rank {injection.rank} made no optimizer step within {_TAKEN_S:.0f} s")
        where = "all ranks" if name == injector.SPIKE else f"rank {injection.rank}"
        return Done(did=f"in {where}: {name.replace('_', ' ')}", seen=job.look())

    strike.__name__, strike.__doc__ = name, function.__doc__
    return strike


for _name, _function in injector.FAULTS.items():
    fault(
        of_a_rank=_name != injector.SPIKE,
        seeded=not _name.startswith(("bit_", "spike_")),
        harmless=_name == "slow",
        corrupts=_name.startswith(("bit_", "inf_", "nan_", "spike_")),
    )(_inside(_name, _function))


@fault(of_a_rank=True, spoils_starts=_STARTS)
def start_fails(job: Job, injection: Injection) -> Done:
    """A rank is killed, and the script's next two starts fail with an ImportError, as with a file server that is away."""
    if job.forgot:  # a script that fails twice before the first step since its command ends the job
        raise NotThere("etcd has lost its data, and no step was made since")
    _order(job, f"{injector.STARTS}-{injection.rank}", str(_STARTS))
    job.rank(injection.rank).send_signal(signal.SIGKILL)
    return Done(did=f"SIGKILL to rank {injection.rank}, and its next {_STARTS} starts fail with an ImportError")
