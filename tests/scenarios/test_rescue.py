"""Data was left out and the fault came again: with `[rescue]` set, the steps around it are computed with care from then on."""

from collections.abc import Callable

from mt_resilient.resilience.inprocess.fallback import RescuePolicy, careful
from mt_resilient.resilience.inprocess.loss_spike import SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.inprocess.tally import RankPolicy

from .cluster import Job

CARE = RankPolicy(
    spikes=SpikePolicy(baseline_steps=16, patience_steps=4),
    ladder=LadderPolicy(distance_steps=4, skip_steps=4, same_fault_steps=12),
    rescue=RescuePolicy(lr_scale=0.5),
)


def test_rescue(golden: Callable[[str], None]) -> None:
    """Bad samples lie wider than what was left out first: the second window comes with care, and the story says so."""
    job = Job(total=40, spike_batches={24, 27, 28}, judged_by=CARE)
    job.ends()
    assert not {24, 27, 28} & {*job.last_state}
    incidents = list(job.incidents.values())
    assert [i.remedy for i in incidents] == ["replay", "replay earlier", "skip", "rescue"]
    assert [i.origin for i in incidents][-1] == "rescued"
    last = incidents[-1].turn
    assert last is not None
    assert last.window is not None
    steps = [step for step in range(40) if careful(step, [i.turn for i in incidents if i.turn])]
    assert steps == list(range(last.to, last.onset + last.window.stop - last.window.start))
    golden(job.transcript())
