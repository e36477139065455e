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
from .registry import Done, Fault, Need, fault

_TAKEN_S = 60.0
_STARTS = 2
_SKIPS_DATA = 2
"""`Page.tells` of a loop that can leave data out."""


def _order(job: Job, name: str, text: str) -> Path:
    order = job.orders / name
    for suffix in (".taken", injector.REFUSED):
        order.with_suffix(suffix).unlink(missing_ok=True)
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
        limit_s, refused = job.patience_s(_TAKEN_S), order.with_suffix(injector.REFUSED)
        if not job.until(lambda: not order.exists() or not job.goes_on(), limit_s) or order.exists():
            order.unlink(missing_ok=True)
            until = f"within {limit_s:.0f} s" if job.goes_on() else "before the job ended"
            raise NotThere(f"rank {injection.rank} made no optimizer step {until}")
        if refused.exists():
            raise NotThere(f"on rank {injection.rank}, {refused.read_text()}")
        where = "all ranks" if name == injector.SPIKE else f"rank {injection.rank}"
        return Done(did=f"in {where}: {name.replace('_', ' ')}", seen=job.look())

    strike.__name__, strike.__doc__ = name, function.__doc__
    return strike


for _name, _function in injector.FAULTS.items():
    fault(
        *([Need.RANKS] if _name in injector.NOT_ALONE else []),
        of_a_rank=_name != injector.SPIKE,
        seeded=not _name.startswith(("bit_", "spike_")),
        harmless=_name == "slow",
        corrupts=_name.startswith(("bit_", "inf_", "nan_", "spike_")),
        found_late=_name.startswith(("bit_", "spike_")),
        in_place=_name.startswith(("bit_", "inf_", "nan_", "spike_")),
    )(_inside(_name, _function))


@fault(of_a_rank=True, spoils_starts=_STARTS)
def start_fails(job: Job, injection: Injection) -> Done:
    """A rank is killed, and the script's next two starts fail with an ImportError, as with a file server that is away."""
    if job.forgot:  # a script that fails twice before the first step since its command ends the job
        raise NotThere("etcd has lost its data, and no step was made since")
    _order(job, f"{injector.STARTS}-{injection.rank}", str(_STARTS))
    job.rank(injection.rank).send_signal(signal.SIGKILL)
    return Done(did=f"SIGKILL to rank {injection.rank}, and its next {_STARTS} starts fail with an ImportError")
