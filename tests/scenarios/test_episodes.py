"""Whole episodes, told second by second: each is played on the simulated node, checked for what matters, and compared with its
golden transcript in `golden/`."""

from collections.abc import Callable
from dataclasses import replace

from mt_resilient.resilience.errors import BudgetSpent, ScriptError, SilentCorruption, SnapshotError
from mt_resilient.resilience.inprocess.loss_spike import SpikePolicy
from mt_resilient.resilience.inprocess.rewind_ladder import LadderPolicy
from mt_resilient.resilience.inprocess.tally import RankPolicy
from mt_resilient.resilience.model.state_machine import Phase

from .cluster import Job
from .node import PATIENCE

Golden = Callable[[str], None]
EVERY_SAMPLE = tuple(range(1, 13))


def ends_well(job: Job, thrown_away: int = 0) -> None:
    """The job ended with every sample used once and in order, its story told to the end, and the costs in it true.

    thrown_away: steps computed again that no incident accounts for, because the job had been ended in between.
    """
    job.ends()
    assert job.last_state == EVERY_SAMPLE
    assert job.disk[12] == EVERY_SAMPLE
    assert [i.id for i in job.incidents.values() if i.open] == []
    lost = sum(incident.lost_steps for incident in job.incidents.values())
    assert job.computed == len(EVERY_SAMPLE) + lost + thrown_away


def test_clean_run(golden: Golden) -> None:
    """Nothing happens to a job."""
    job = Job()
    ends_well(job)
    assert not job.incidents
    golden(job.transcript())


def test_rank_killed(golden: Golden) -> None:
    """A rank is killed in the middle: the worker group restarts from memory."""
    job = Job()
    job.until_step(5)
    job.kill_rank(1)
    ends_well(job)
    golden(job.transcript())


def test_rank_killed_during_launch(golden: Golden) -> None:
    """A rank is killed before its first step: there is nothing to go back to and nothing to replay."""
    job = Job()
    job.until_phase(Phase.RUN, 1)
    job.kill_rank(0)
    ends_well(job)
    golden(job.transcript())


def test_killed_twice(golden: Golden) -> None:
    """The second kill hits the recovery from the first."""
    job = Job()
    job.until_step(6)
    job.kill_rank(1)
    job.until_phase(Phase.RUN, 2)
    job.kill_rank(0)
    ends_well(job)
    assert len(job.incidents) == 2
    golden(job.transcript())


def test_killed_while_replaying(golden: Golden) -> None:
    """The second kill hits a rank that is still computing again what the first one cost, from a snapshot on disk."""
    job = Job(durable_every=2)
    job.until_step(6)
    job.kill_agent()
    job.tick()
    job.start_agent()
    job.until_step(5)
    job.kill_rank(0)
    ends_well(job)
    golden(job.transcript())


def test_script_fails_at_import(golden: Golden) -> None:
    """The script fails twice in the same way before it reported a step: that is an error of its own."""
    job = Job(import_error="ModuleNotFoundError: No module named 'megatorn'")
    job.ends(ScriptError.exit_code)
    assert len(job.incidents) == 2
    golden(job.transcript())


def test_no_progress(golden: Golden) -> None:
    """A rank is killed after the same step whatever one does: after three restarts the budget is spent."""
    job = Job(kill_at={6: 99})
    job.ends(BudgetSpent.exit_code)
    assert len(job.incidents) == 4
    golden(job.transcript())


def test_nan_once(golden: Golden) -> None:
    """One step gives NaN once: all ranks go back in place, no process is restarted."""
    job = Job(nan_at={5: 1})
    ends_well(job)
    assert job.world().record is not None
    assert job.rungs == [1]
    golden(job.transcript())


def test_nan_once_where_the_data_is_not_known(golden: Golden) -> None:
    """The same, in a script that takes its batches by itself: it may have been the data, so nobody's hardware is blamed."""
    job = Job(nan_at={5: 1}, fixed_data=True)
    job.to_the_end()
    assert [(i.rung, i.remedy, i.origin) for i in job.incidents.values()] == [(1, "rewind", "undecided")]
    golden(job.transcript())


def test_nan_at_the_last_step(golden: Golden) -> None:
    """The very last step gives NaN: it is judged before the loop may end."""
    job = Job(nan_at={12: 1})
    ends_well(job)
    golden(job.transcript())


def test_nan_persists(golden: Golden) -> None:
    """One step gives NaN however often it is replayed: the job stops, the state before it is kept."""
    job = Job(nan_at={5: 99})
    job.ends(BudgetSpent.exit_code)
    assert max(job.disk) == 4
    golden(job.transcript())


def test_nan_that_only_new_processes_cure(golden: Golden) -> None:
    """NaN has come into a variable of the script, which no rewind restores: the ranks start again from the state before it, once."""
    job = Job(nan_at={5: 6})
    job.to_the_end()
    assert job.rungs == [1, 1, 1, 1, 1, 2]
    golden(job.transcript())


def test_nan_while_stopping(golden: Golden) -> None:
    """A step gives NaN just when the ranks are to leave: they go back first, and the last snapshot is a finite one."""
    job = Job(nan_at={6: 1})
    job.until_step(5)
    job.ask_to_stop(snapshot=True)
    job.ends(130)
    assert all(state == tuple(range(1, step + 1)) for step, state in job.disk.items())
    assert max(job.disk) >= 6
    golden(job.transcript())


def test_agent_killed(golden: Golden) -> None:
    """The agent is killed, memory and ranks with it, and started again: the job goes on from disk."""
    job = Job()
    job.until_step(7)
    job.kill_agent()
    job.wait(3)
    job.start_agent()
    ends_well(job)
    golden(job.transcript())


def test_agent_killed_and_another_one_leads(golden: Golden) -> None:
    """The agent is killed while another one could lead: that one opens one generation, and waits for it."""
    job = Job()
    job.stand_by()
    job.until_step(6)
    job.kill_agent()
    job.wait(20)
    assert len(job.incidents) == 1
    job.start_agent()
    ends_well(job)
    golden(job.transcript())


def test_agent_killed_while_gathering(golden: Golden) -> None:
    """The agent is killed in the middle of a recovery."""
    job = Job()
    job.until_step(7)
    job.kill_rank(1)
    job.until_phase(Phase.GATHER, 2)
    job.kill_agent()
    job.tick()
    job.start_agent()
    ends_well(job)
    golden(job.transcript())


def test_agent_killed_while_ending(golden: Golden) -> None:
    """Ctrl-C twice: the second one ends the agent while the job is ending. The same command goes on from disk."""
    job = Job()
    job.until_step(6)
    job.ask_to_stop(snapshot=True)
    job.until_phase(Phase.ENDING, 1)
    job.kill_agent()
    job.tick()
    job.start_agent()
    ends_well(job, thrown_away=3)
    golden(job.transcript())


def test_stopped_and_started_again(golden: Golden) -> None:
    """Somebody stops the job, with a last snapshot. The same command goes on from it."""
    job = Job()
    job.until_step(5)
    job.ask_to_stop(snapshot=True)
    job.until(lambda job: job.exit_code == 130)
    job.start_agent()
    ends_well(job)
    golden(job.transcript())


def test_out_of_budget_and_started_again(golden: Golden) -> None:
    """The job gave up. Somebody mends what was wrong and starts the same command: it goes on, with its budget as new."""
    job = Job(kill_at={6: 4})
    job.until(lambda job: job.exit_code == BudgetSpent.exit_code, patience=200)
    job.start_agent()
    ends_well(job, thrown_away=2)
    golden(job.transcript())


def test_snapshot_unusable(golden: Golden) -> None:
    """The newest snapshot on disk is torn: it is set aside and the one before it is taken."""
    job = Job(durable_every=2, torn={6})
    job.until_committed(6)
    job.kill_agent()
    job.tick()
    job.start_agent()
    ends_well(job)
    golden(job.transcript())


def test_every_snapshot_unusable(golden: Golden) -> None:
    """All that is on disk is torn: the job stops, and does not begin anew unasked, not even when it is started again."""
    job = Job(durable_every=2, torn={2, 4, 6})
    job.until_committed(6)
    job.kill_agent()
    job.tick()
    job.start_agent()
    job.until(lambda job: job.exit_code is not None, patience=200)
    assert job.exit_code == SnapshotError.exit_code
    job.start_agent()
    job.until(lambda job: job.exit_code is not None, patience=200)
    assert job.exit_code == SnapshotError.exit_code
    golden(job.transcript())


def test_stop_without_snapshot(golden: Golden) -> None:
    """Somebody stops the job: the ranks are ended where they are."""
    job = Job()
    job.until_step(6)
    job.ask_to_stop(snapshot=False)
    job.ends(130)
    assert max(job.disk) == 4
    golden(job.transcript())


def test_stop_with_snapshot(golden: Golden) -> None:
    """Somebody stops the job and wants a last snapshot: the ranks leave at a boundary, after it."""
    job = Job()
    job.until_step(4)
    job.ask_to_stop(snapshot=True)
    job.ends(130)
    assert max(job.disk) == 7
    golden(job.transcript())


def test_stop_while_gathering(golden: Golden) -> None:
    """Somebody stops a job that is just recovering: nothing is started for somebody who is leaving."""
    job = Job()
    job.until_step(5)
    job.kill_rank(1)
    job.until_phase(Phase.GATHER, 2)
    job.ask_to_stop(snapshot=True)
    job.ends(130)
    golden(job.transcript())


def test_rank_killed_while_stopping(golden: Golden) -> None:
    """A rank dies between the order to leave and the boundary: the node does not wait for the grace time."""
    job = Job()
    job.until_step(5)
    job.ask_to_stop(snapshot=True)
    job.until_phase(Phase.ENDING, 1)
    asked_s = job.now_s
    job.kill_rank(1)
    job.ends(130)
    assert job.now_s - asked_s < PATIENCE.leave_s
    golden(job.transcript())


def test_store_away(golden: Golden) -> None:
    """etcd does not answer for a while: training goes on. Then a rank dies, and recovers as ever."""
    job = Job()
    job.until_step(2)
    job.stop_store()
    job.until_step(5)
    job.start_store()
    job.until_step(6)
    job.kill_rank(1)
    ends_well(job)
    golden(job.transcript())


def test_rank_killed_while_the_store_is_away(golden: Golden) -> None:
    """A rank dies while etcd does not answer: the recovery waits for it."""
    job = Job()
    job.until_step(4)
    job.stop_store()
    job.kill_rank(1)
    job.wait(4)
    job.start_store()
    ends_well(job)
    golden(job.transcript())


def test_lease_lost_and_granted_anew(golden: Golden) -> None:
    """The agent is held up for longer than its lease lives: it registers anew as the same one, and nothing has to be restarted."""
    job = Job(total=20)
    job.until_step(2)
    job.faults.agent_stalls = True
    job.wait(11)
    assert not job.world().nodes
    job.faults.agent_stalls = False
    job.ends(samples=range(1, 21))
    assert not job.incidents
    golden(job.transcript())


def test_controller_replaced(golden: Golden) -> None:
    """The leader is deposed between two writes of a recovery: its successor goes on where it stopped."""
    job = Job()
    job.stand_by()
    job.until_step(5)
    job.kill_rank(1)
    job.until_phase(Phase.GATHER, 2)
    job.depose()
    ends_well(job)
    assert len(job.incidents) == 1
    golden(job.transcript())


# -- data, state, hardware: the ranks' own rungs -----------------------------------------------------------------------------------

QUICK = RankPolicy(
    spikes=SpikePolicy(baseline_steps=16, patience_steps=4),
    ladder=LadderPolicy(distance_steps=4, skip_steps=4, same_fault_steps=12),
)
"""For trainings of a few dozen steps."""


def without(total: int, *left_out: range) -> tuple[int, ...]:
    """The samples of `total` steps that leave some out."""
    samples = [n for n in range(1, 2 * total + 50) if not any(n in each for each in left_out)]
    return tuple(samples[:total])


def test_nan_in_the_data(golden: Golden) -> None:
    """A sample gives NaN however often it is used: it is replayed, then left out, and nothing else is."""
    job = Job(nan_batches={7}, judged_by=QUICK)
    job.ends()
    assert job.last_state == job.disk[12] == without(12, range(7, 8))
    assert [i.origin for i in job.incidents.values()] == ["again", "again", "data"]
    golden(job.transcript())


def test_nan_in_data_that_cannot_be_left_out(golden: Golden) -> None:
    """The same, in a script whose data is not known: none can be left out, and the job stops."""
    job = Job(nan_batches={7}, fixed_data=True)
    job.ends(93)
    assert max(job.disk) < 7
    golden(job.transcript())


def test_several_bad_samples_in_turn(golden: Golden) -> None:
    """The sample behind the one that was left out gives NaN too: twice as many are left out."""
    job = Job(nan_batches={7, 8, 9}, judged_by=QUICK)
    job.ends()
    assert job.last_state == without(12, range(7, 10))
    golden(job.transcript())


def test_killed_after_data_was_left_out(golden: Golden) -> None:
    """A rank dies when data has been left out: the next ranks leave the same data out."""
    job = Job(nan_batches={7}, kill_at={7: 1}, judged_by=QUICK, durable_every=3)
    job.ends()
    assert job.last_state == without(12, range(7, 8))
    golden(job.transcript())


def test_agent_killed_while_data_is_left_out(golden: Golden) -> None:
    """The agent dies with its memory just after data was left out, and is started again: it goes back before that data, from disk,
    and knows what to leave out."""
    job = Job(nan_batches={7}, judged_by=QUICK, total=16)
    job.until(lambda job: len(job.incidents) == 3)
    job.tick()
    job.kill_agent()
    job.wait(12)
    job.start_agent()
    job.ends()
    assert job.last_state == without(16, range(7, 8))
    golden(job.transcript())


def test_spike_once(golden: Golden) -> None:
    """The state is damaged once and the loss goes up: the ranks go back before it, and it does not come again."""
    job = Job(total=32, spike_at={24: 1}, judged_by=QUICK)
    job.ends()
    assert job.last_state == without(32)
    assert [i.origin for i in job.incidents.values()] == ["transient"]
    golden(job.transcript())


def test_spike_in_the_data(golden: Golden) -> None:
    """The loss goes up at a sample and stays there, at every replay: the samples around it are left out."""
    job = Job(total=32, spike_batches={24}, judged_by=QUICK)
    job.ends()
    assert 24 not in job.last_state
    assert len(set(job.last_state)) == 32
    assert [i.origin for i in job.incidents.values()][-1] == "data"
    golden(job.transcript())


def test_spike_that_comes_back(golden: Golden) -> None:
    """Bad samples lie wider than what was left out: twice as much is left out, from further back."""
    job = Job(total=40, spike_batches={24, 27, 28}, judged_by=QUICK)
    job.ends()
    assert not {24, 27, 28} & {*job.last_state}
    golden(job.transcript())


def test_spike_without_end(golden: Golden) -> None:
    """All samples from some point on are bad: data is left out three times, and then the ranks train on."""
    job = Job(total=60, spike_batches=set(range(24, 400)), judged_by=QUICK)
    job.ends()
    assert [i.remedy for i in job.incidents.values()] == [
        "replay",
        "replay earlier",
        "skip",
        "skip",
        "skip",
        "continue",
    ]
    golden(job.transcript())


def test_spike_without_end_of_a_job_that_is_to_end_then(golden: Golden) -> None:
    """As before, and `ladder.end_job` is set: the job stops."""
    policy = replace(QUICK, ladder=replace(QUICK.ladder, end_job=True))
    job = Job(total=60, spike_batches=set(range(24, 400)), judged_by=policy)
    job.ends(93)
    assert all(max(state, default=0) < 24 for state in job.disk.values())
    golden(job.transcript())


PATIENT = replace(QUICK, spikes=replace(QUICK.spikes, patience_steps=16))


def test_a_hard_stretch_of_data(golden: Golden) -> None:
    """The loss is high for five steps and comes back: the state before it is kept, and no step is computed again."""
    job = Job(total=48, hard_steps=set(range(26, 31)), judged_by=PATIENT)
    job.ends()
    assert job.last_state == without(48)
    assert [(i.cause, i.rung, i.open) for i in job.incidents.values()] == [("loss_spike", 0, False)]
    golden(job.transcript())


def test_two_hard_stretches_of_data() -> None:
    """Each is told, with the state that was kept before it, also if the second follows soon after the first."""
    policy = replace(PATIENT, ladder=LadderPolicy())
    job = Job(total=64, hard_steps={*range(26, 31), *range(50, 55)}, judged_by=policy)
    job.ends()
    assert job.last_state == without(64)
    assert [(i.cause, i.onset, i.open) for i in job.incidents.values()] == [
        ("loss_spike", 26, False),
        ("loss_spike", 50, False),
    ]


def test_a_spike_of_a_rank_whose_own_gradient_was_out_of_line(golden: Golden) -> None:
    """The state is damaged once. One rank stands out, so the ranks do not wait: a replay of a few steps tells."""
    job = Job(total=48, spike_at={26: 1}, odd=True, judged_by=PATIENT)
    job.ends()
    assert job.last_state == without(48)
    assert [(i.cause, i.rung, i.ranks, i.origin) for i in job.incidents.values()] == [
        ("loss_spike", 1, (1,), "transient")
    ]
    golden(job.transcript())


def test_a_high_loss_that_does_not_come_back(golden: Golden) -> None:
    """The state is damaged once. The ranks wait for the loss, then rewind to before it; the replay is clean."""
    job = Job(total=60, spike_at={26: 1}, judged_by=PATIENT)
    job.ends()
    assert job.last_state == without(60)
    assert [(i.cause, i.rung, i.open) for i in job.incidents.values()] == [
        ("loss_spike", 0, False),
        ("loss_divergence", 1, False),
    ]
    golden(job.transcript())


def test_nan_after_a_spike(golden: Golden) -> None:
    """The loss goes up, and some steps later gives NaN: the ranks rewind to before the spike."""
    job = Job(total=48, spike_at={26: 1}, nan_at={32: 1}, judged_by=PATIENT)
    job.ends()
    assert job.last_state == without(48)
    assert [i.onset for i in job.incidents.values()] == [26, 26]
    golden(job.transcript())


def test_a_rank_dies_while_a_spike_is_watched(golden: Golden) -> None:
    """The ranks start again from a state after the spike's onset, with the watch in it."""
    job = Job(total=60, spike_at={26: 1}, judged_by=PATIENT)
    job.until(lambda job: bool(job.incidents))
    job.kill_rank(1)
    job.ends()
    assert job.last_state == without(60)
    golden(job.transcript())


def test_nan_while_a_spike_is_replayed(golden: Golden) -> None:
    """One step of the replay of a spike gives NaN."""
    job = Job(total=32, spike_at={24: 1}, nan_at={22: 0}, judged_by=QUICK)
    job.until(lambda job: bool(job.incidents))
    job.faults.nan_at[24] = 1
    job.ends()
    assert job.last_state == without(32)
    golden(job.transcript())


# -- two faults at once, and etcd away at each phase -------------------------------------------------------------------------------


def test_rank_killed_during_a_rewind(golden: Golden) -> None:
    """A rank dies right after all of them have gone back in place, before they have done a step."""
    job = Job(nan_at={6: 1})
    job.until(lambda job: bool(job.node and job.node.ranks and job.ranks.rewinds))
    job.kill_rank(1)
    ends_well(job)
    assert job.causes == ["non_finite", "rank_killed"]
    golden(job.transcript())


def test_copy_in_memory_damaged_when_ranks_go_back(golden: Golden) -> None:
    """A step gives NaN, and the snapshot in memory that the ranks go back to is damaged: they start again from an older one."""
    job = Job(nan_at={7: 1}, rot={6})
    ends_well(job)
    golden(job.transcript())


def test_controller_deposed_while_deciding(golden: Golden) -> None:
    """The leader has read that a rank died, and is deposed before it writes: its write is refused, its successor's is not."""
    job = Job()
    job.stand_by()
    job.until_step(5)
    job.kill_rank(1)
    job.store.amid = job.depose
    ends_well(job)
    assert len(job.incidents) == 1
    golden(job.transcript())


def test_nan_while_steps_are_computed_again(golden: Golden) -> None:
    """A rank is killed, and a step that is computed again because of it gives NaN."""
    job = Job(durable_every=2)
    job.until_step(6)
    job.kill_agent()
    job.tick()
    job.start_agent()
    job.faults.nan_at[5] = 1
    ends_well(job)
    golden(job.transcript())


def test_nan_and_a_flip_and_a_kill(golden: Golden) -> None:
    """A bit flips, what is computed from it gives NaN, and before that is found a rank is killed."""
    job = Job(ranks=3, flip_at={7: 1}, nan_at={8: 1}, kill_at={8: 1})
    ends_well(job)
    golden(job.transcript())


def test_flips_while_stopping(golden: Golden) -> None:
    """A bit flips just when somebody stops the job: the snapshot that was about to go to disk is damaged, and does not."""
    job = Job(flip_at={7: 1}, durable_every=7)
    job.until_step(7)
    job.ask_to_stop(snapshot=False)
    job.until(lambda job: job.exit_code == 130)
    assert not job.disk
    job.start_agent()
    job.ends()
    assert job.last_state == EVERY_SAMPLE
    golden(job.transcript())


def _store_away_in(phase: Phase, golden: Golden) -> None:
    """etcd does not answer for eight seconds, from there on; a rank has been killed before."""
    job = Job()
    job.until_step(5)
    job.kill_rank(1)
    job.until_phase(phase, 2)
    job.stop_store()
    job.wait(8)
    job.start_store()
    ends_well(job)
    golden(job.transcript())


def test_store_away_while_gathering(golden: Golden) -> None:
    """etcd does not answer while the nodes gather: nothing is started before it does."""
    _store_away_in(Phase.GATHER, golden)


def test_store_away_while_launching(golden: Golden) -> None:
    """etcd does not answer while the ranks start: they start, and train."""
    _store_away_in(Phase.LAUNCH, golden)


def test_store_away_while_running(golden: Golden) -> None:
    """etcd does not answer after a recovery: it is told to its end when etcd is back."""
    _store_away_in(Phase.RUN, golden)


def test_store_away_while_ending(golden: Golden) -> None:
    """etcd does not answer while the job ends: the agent leaves when it does."""
    job = Job()
    job.until_phase(Phase.ENDING, 1)
    job.stop_store()
    job.wait(8)
    job.start_store()
    ends_well(job)
    golden(job.transcript())


def test_registration_without_an_answer(golden: Golden) -> None:
    """The agent's first word to etcd gets no answer, and is made seconds later: it is known all the same, and stays known."""
    job = Job()
    job.store.unanswered.append(5.0)
    ends_well(job)
    assert not job.incidents
    golden(job.transcript())


def test_disk_full_to_the_end(golden: Golden) -> None:
    """The disk is full when the training is over: the agent waits with the last snapshot until there is room."""
    job = Job(disk_full=True)
    job.until_phase(Phase.ENDING, 1)
    job.wait(8)
    assert not job.disk
    job.faults.disk_full = False
    ends_well(job)
    golden(job.transcript())


def test_storage_does_not_answer(golden: Golden) -> None:
    """The agent is started again, and storage does not give the snapshot: the ranks ask for it once more, and then it does."""
    job = Job()
    job.until_step(7)
    job.kill_agent()
    job.faults.unreadable = True
    job.start_agent()
    job.until_phase(Phase.GATHER, 3)
    job.faults.unreadable = False
    ends_well(job)
    golden(job.transcript())


def test_rank_hangs(golden: Golden) -> None:
    """A rank stops moving in the middle: the one that did not enter the collective is named, and the worker group restarts from memory."""
    job = Job(hang_at={6: 1})
    ends_well(job)
    (incident,) = job.incidents.values()
    assert (incident.cause, incident.rung) == ("rank_hung", 2)
    assert "rank 1" in incident.summary
    golden(job.transcript())


def test_rank_is_slow_but_moves(golden: Golden) -> None:
    """A rank computes at one step for far longer than at others: that is told once, and it is left alone."""
    job = Job(busy_at={6: 20})
    ends_well(job)
    assert not job.incidents
    golden(job.transcript())


def test_rank_hangs_while_it_starts(golden: Golden) -> None:
    """A rank hangs before its first step, once: the budget is that of a start."""
    job = Job(hangs_at_start=1)
    ends_well(job)
    golden(job.transcript())


def test_ranks_hang_at_each_start(golden: Golden) -> None:
    """A rank hangs twice in the same way before it reported a step: that is an error of the script's own."""
    job = Job(hangs_at_start=9)
    job.ends(ScriptError.exit_code)
    assert len(job.incidents) == 2
    golden(job.transcript())


def test_rank_hangs_while_replaying(golden: Golden) -> None:
    """A rank is killed, and when the steps are computed again it hangs."""
    job = Job(kill_at={6: 1}, hang_at={6: 1})
    ends_well(job)
    assert job.causes == ["rank_killed", "rank_hung"]
    golden(job.transcript())


def test_rank_hangs_again_and_again(golden: Golden) -> None:
    """A rank hangs after the same step whatever one does: after three restarts the budget is spent."""
    job = Job(hang_at={6: 99})
    job.ends(BudgetSpent.exit_code)
    golden(job.transcript())


def test_rank_hangs_while_the_store_is_away(golden: Golden) -> None:
    """A rank hangs while etcd does not answer: it is seen, and nobody is ended before etcd is back."""
    job = Job(hang_at={6: 1})
    job.until_step(5)
    job.stop_store()
    job.wait(15)
    assert job.ranks.hung
    job.start_store()
    ends_well(job)
    golden(job.transcript())


def test_agent_is_held_up_and_ranks_with_it(golden: Golden) -> None:
    """The whole machine stands still for a while: nobody was there to hear the ranks, so their silence does not count."""
    job = Job(busy_at={6: 9}, total=14)
    job.until_step(6)
    job.now_s += 100
    job.ends()
    assert not job.incidents
    golden(job.transcript())


def test_teardown_hangs(golden: Golden) -> None:
    """The loop is over and the last state on disk, and then the ranks do not end: they are ended, and the job counts as finished."""
    job = Job(hangs_in_teardown=True)
    ends_well(job)
    assert not job.incidents
    golden(job.transcript())


def test_replica_of_three_flips(golden: Golden) -> None:
    """A bit of one of three replicas flips: the vote blames it, and the worker group goes back to before it."""
    job = Job(ranks=3, flip_at={7: 1})
    ends_well(job)
    (incident,) = job.incidents.values()
    assert incident.onset == 7
    assert "rank 1 differs from the others" in incident.summary
    golden(job.transcript())


def test_replica_of_two_flips(golden: Golden) -> None:
    """A bit of one of two replicas flips: nobody knows of which, until the step has been computed again."""
    job = Job(flip_at={7: 1})
    ends_well(job)
    (incident,) = job.incidents.values()
    assert "it is not known which" in incident.summary
    assert "rank 1 was wrong" in incident.evidence[-1]
    golden(job.transcript())


def test_flips_and_is_killed(golden: Golden) -> None:
    """A bit flips and the rank is killed at once: the newest snapshot in memory is not what the worker group goes on from."""
    job = Job(flip_at={7: 1}, kill_at={8: 1})
    ends_well(job)
    assert max(i.resume_step or 0 for i in job.incidents.values()) < 7
    golden(job.transcript())


def test_flips_in_the_replay(golden: Golden) -> None:
    """A bit flips after a step that is computed again because of a kill."""
    job = Job(ranks=3)
    job.until_step(8)
    job.kill_rank(0)
    job.faults.flip_at[9] = 1
    job.faults.kill_at[10] = 1
    ends_well(job)
    golden(job.transcript())


def test_flips_and_gives_nan(golden: Golden) -> None:
    """What a wrong replica has computed gives NaN: the ranks go back in place, and then, when it is found, to before it."""
    job = Job(flip_at={7: 1}, nan_at={8: 1})
    ends_well(job)
    golden(job.transcript())


def test_flips_again_and_again(golden: Golden) -> None:
    """Bits flip whatever one does: the third time the job stops, and what is on disk is from before the first."""
    job = Job(ranks=3, flip_at={7: 9})
    job.ends(SilentCorruption.exit_code)
    assert max(job.disk) == 4
    golden(job.transcript())
