"""A whole simulated run: faults of a model, drawn from a seed, strike a job. The job's agents obey what the controller decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..scenario.config import Setting
from ..scenario.faults import Fault, Model, draw
from . import agents, fault_effects
from .engine import Play
from .outcome import Outcome


def played(setting: Setting, model: Model, told: Callable[[float], None] = lambda share: None) -> Outcome:
    """Run a job with the faults that its seed draws. told: called now and then with the share of the simulated time that has passed. Raises
    UsageError."""
    machines = setting.nodes + setting.spares
    return lived(setting, draw(model, machines, setting.lasts_s, setting.rate, setting.seed), told)


def lived(setting: Setting, faults: Sequence[Fault], told: Callable[[float], None] = lambda share: None) -> Outcome:
    """Run a job with these faults."""
    play = Play(setting, agents.heard, fault_effects.taken_away)
    for fault in faults:
        play.later(fault.at_s, fault_effects.strike, play, fault)
    play.run(told)
    play.outcome.finish(play.books, play.cluster, len(faults))
    return play.outcome
