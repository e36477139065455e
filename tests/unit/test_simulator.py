"""The simulated cluster against what is known beforehand: sums, limits, the closed formula, and itself."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from math import exp, expm1, sqrt
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mt_resilient.checkpoint.durable.save_interval import CopiesPolicy, SnapshotPolicy
from mt_resilient.cli import main
from mt_resilient.resilience.errors import UsageError
from mt_resilient.simulator.engine.outcome import Outcome
from mt_resilient.simulator.engine.run import lived, played
from mt_resilient.simulator.results import sensitivity
from mt_resilient.simulator.scenario import fault_models
from mt_resilient.simulator.scenario.config import Setting
from mt_resilient.simulator.scenario.costs import Costs
from mt_resilient.simulator.scenario.faults import DAY_S, Model, Pattern, Shows, Source, draw

PLAIN = Costs(step_s=5.0, boundary_s=0.0, durable_stall_s=0.0, jitter_s=0.0)
DEATHS = Model(name="deaths", sources=(Source(name="death", shows=Shows.DIES, per_1000_node_days=1000.0),))


def setting(**changes: object) -> Setting:
    return Setting(**{"nodes": 8, "days": 20.0, "costs": PLAIN, **changes})  # type: ignore[arg-type]


def one(shows: Shows, at_day: float = 1.0, **source: object) -> Model:
    """A model of one kind of fault."""
    per = {"per_day": 0.01} if shows is Shows.SPIKES else {"per_1000_node_days": 1.0}
    return Model(name="one", sources=(Source(name=shows, shows=shows, **{**per, **source}),))  # type: ignore[arg-type]


def after(model: Model, what: Setting, at_s: float = DAY_S, **fault: object) -> Outcome:
    """One fault of it, at machine 3."""
    drawn = draw(model, what.nodes, 100 * DAY_S, 1e4, seed=1)[0]
    return lived(what, [replace(drawn, **{"at_s": at_s, "machine": 3, **fault})])  # type: ignore[arg-type]


def caused(outcome: Outcome) -> dict[tuple[str, int], int]:
    return dict(outcome.recoveries)


# -- sums and limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("faults", ["llama3", "stepfun,failslow,spikes"])
def test_every_second_is_in_one_account(faults: str) -> None:
    what = setting(nodes=32, spares=8, days=54.0, rate=6.0, costs=Costs())
    outcome = played(what, fault_models.named(faults))
    assert sum(outcome.spent_s.values()) == pytest.approx(what.lasts_s, abs=1e-3)
    assert min(outcome.spent_s.values()) > -1e-3
    assert outcome.steps * what.costs.step_s == pytest.approx(outcome.spent_s["steps"], abs=what.costs.step_s)
    assert sum(outcome.struck.values()) + outcome.idle == outcome.drawn


def test_without_faults_only_the_start_and_the_snapshots_are_lost() -> None:
    costs = replace(PLAIN, stall_s=0.05)
    outcome = played(setting(costs=costs, snapshots=SnapshotPolicy(every_steps=2)), fault_models.none())
    assert outcome.recoveries == {}
    assert outcome.generations == 1
    start_s = outcome.spent_s["start"] + outcome.spent_s["build"] + outcome.spent_s["step"]
    ideal = 1 / (1 + 0.05 / (2 * 5.0)) * (1 - start_s / outcome.setting.lasts_s)
    assert outcome.effective == pytest.approx(ideal, rel=1e-9)


def test_the_more_faults_the_less_is_left() -> None:
    found = [played(setting(rate=rate, days=5.0), DEATHS).effective for rate in (0.0, 1.0, 3.0, 9.0)]
    assert all(fewer > more for fewer, more in pairwise(found))
    assert found[0] > 0.999
    assert found[-1] < 0.992


# -- the formula --------------------------------------------------------------------------------------------------------


def first_order(per_s: float, recovery_s: float, interval_s: float, stall_s: float, late_s: float = 0.0) -> float:
    """Return the share of time spent on steps that count, for one kind of fault and constant costs. Young (CACM 17(9), 1974), as Meta has
    it for clusters (arXiv:2410.21680): accurate as long as faults are rare. late_s: seconds until a snapshot can be restored."""
    return 1 / (1 + per_s * (recovery_s + late_s + interval_s / 2) + stall_s / interval_s)


def complete(per_s: float, recovery_s: float, interval_s: float, stall_s: float) -> float:
    """Return the same share by Daly's complete model (FGCS 22, 2006, equation 20), in which recoveries can fail too."""
    return interval_s * per_s / (exp(per_s * recovery_s) * expm1(per_s * (interval_s + stall_s)))


@pytest.mark.parametrize(
    ("every", "build_s", "rate"), [(1, 30.0, 4.0), (40, 30.0, 4.0), (100, 120.0, 2.0), (20, 60.0, 8.0)]
)
def test_the_simulator_agrees_with_the_closed_formula(every: int, build_s: float, rate: float) -> None:
    costs = replace(PLAIN, build_s=build_s, build_per_rank_s=0.0, stall_s=0.02)
    what = setting(nodes=4, days=5.0, rate=rate, costs=costs, snapshots=SnapshotPolicy(every_steps=every))
    found = [played(replace(what, seed=seed), DEATHS) for seed in range(5)]
    period_s = costs.step_s + costs.stall_s / every
    interval_s, late_s = every * costs.step_s, period_s * costs.seal_steps
    recovery_s = costs.restart_s(what.nodes, what.ranks)
    per_s = DEATHS.per_s(what.nodes) * what.rate
    expected = first_order(per_s, recovery_s, interval_s, costs.stall_s, late_s)
    # What one fault costs is certain but for where in the interval it strikes; how many there are is a Poisson number.
    cost_s = recovery_s + late_s + interval_s / 2
    faults = per_s * what.lasts_s * len(found)
    error = (cost_s * sqrt(faults) + interval_s * sqrt(faults / 12)) / (what.lasts_s * len(found))
    second_order = (per_s * cost_s) ** 2
    mean = sum(outcome.effective for outcome in found) / len(found)
    assert mean == pytest.approx(expected, abs=3 * error + second_order)
    assert 1 - mean == pytest.approx(1 - expected, rel=0.15)
    daly = complete(per_s, recovery_s + late_s, interval_s, costs.stall_s)
    assert mean == pytest.approx(daly, abs=3 * error + second_order)


def test_the_formulas_agree_where_faults_are_rare() -> None:
    assert complete(1e-6, 60, 600, 1.0) == pytest.approx(first_order(1e-6, 60, 600, 1.0), abs=1e-5)


# -- each way in which a fault shows --------------------------------------------------------------------------------------


def test_a_dead_rank_is_a_restart_from_memory() -> None:
    outcome = after(one(Shows.DIES), setting())
    assert caused(outcome) == {("script_raised", 2): 1}
    assert outcome.lost_steps in ([1], [2])
    restart_s = PLAIN.restart_s(8, 64)
    assert sum(map(sum, outcome.phases_s.values())) == pytest.approx(
        restart_s + PLAIN.step_s + outcome.spent_s["replay"] - outcome.spent_s["replay"] % PLAIN.step_s,
        abs=2 * PLAIN.step_s,
    )


def test_a_broken_node_is_replaced_from_its_buddys_memory() -> None:
    outcome = after(one(Shows.DIES, lasting=1.0), setting(spares=1))
    assert caused(outcome) == {
        ("script_raised", 2): 1,
        ("script_raised", 3): 1,
    }  # it fails there again, and is shut out
    assert outcome.spent_s["nodes"] < 2
    assert max(outcome.lost_steps) * PLAIN.step_s <= PLAIN.copy_s + 5 * PLAIN.step_s
    assert outcome.away_most == 1


def test_a_broken_spare_is_known_when_it_has_a_place() -> None:
    what = setting(spares=2)
    broken, gone = (draw(one(shows, lasting=1.0), 8, 100 * DAY_S, 1e4, seed=1)[0] for shows in (Shows.DIES, Shows.LOST))
    faults = (replace(broken, at_s=DAY_S, machine=8), replace(gone, at_s=1.5 * DAY_S, machine=3))
    outcome = lived(what, faults)
    assert caused(outcome) == {("agent_lost", 3): 1, ("script_raised", 3): 1}
    assert (outcome.idle, outcome.shut_out, outcome.away_most) == (1, 1, 2)


def test_a_broken_node_that_nobody_can_take_the_place_of_ends_the_job_until_it_is_repaired() -> None:
    outcome = after(one(Shows.DIES, lasting=1.0), setting(), repair_s=7200.0)
    assert [ending.code for ending in outcome.endings] == [93]
    assert outcome.spent_s["start"] == pytest.approx(1 + 5 + 25 + 125 + 300, rel=0.1)
    assert outcome.spent_s["operator"] == PLAIN.operator_s
    assert outcome.spent_s["nodes"] == pytest.approx(7200.0, rel=0.01)


@pytest.mark.parametrize("build_s", [0.0, 5.0, 60.0])
def test_what_is_fetched_comes_while_the_ranks_start_and_build(build_s: float) -> None:
    costs = replace(PLAIN, build_s=build_s, build_per_rank_s=0.0)
    outcome = after(one(Shows.LOST), setting(spares=1, costs=costs))
    waits_s = max(0.0, costs.fetch_s - costs.start_s - build_s)
    assert outcome.spent_s["restore"] == pytest.approx(waits_s + costs.restore_s)


def test_without_buddies_it_goes_on_from_disk() -> None:
    what = setting(spares=1, copies=CopiesPolicy(every_s=0), snapshots=SnapshotPolicy(durable_every_steps=100))
    outcome = after(one(Shows.LOST), what)
    assert 100 * PLAIN.step_s + PLAIN.write_s >= max(outcome.lost_steps) * PLAIN.step_s > PLAIN.step_s
    assert outcome.spent_s["restore"] == pytest.approx(PLAIN.read_s)


def test_what_a_lost_node_costs_hangs_on_how_often_copies_are_made() -> None:
    """Half an interval in the mean, and what it takes until a copy is there; the step that was cut off is not counted."""
    nodes = Model(name="nodes", sources=(Source(name="node", shows=Shows.LOST, per_1000_node_days=100.0),))
    late_s = PLAIN.copy_s + (PLAIN.seal_steps - 0.5) * PLAIN.step_s
    for every_s, interval_s in ((10.0, 2 * PLAIN.copy_s), (60.0, 60.0), (300.0, 300.0)):
        outcome = played(setting(spares=24, days=200.0, copies=CopiesPolicy(every_s=every_s)), nodes)
        lost_s = sum(outcome.lost_steps) / len(outcome.lost_steps) * PLAIN.step_s
        assert len(outcome.lost_steps) > 100
        assert lost_s == pytest.approx(late_s + interval_s / 2, rel=0.1), every_s


def test_without_a_spare_the_job_waits_for_the_repair() -> None:
    outcome = after(one(Shows.LOST), setting(), repair_s=3600.0)
    assert outcome.spent_s["nodes"] == pytest.approx(3600, rel=0.05)


def test_with_fewer_nodes_it_goes_on_slower_and_grows_again() -> None:
    what = setting(sizes=tuple(range(6, 9)), days=3.0)
    outcome = after(one(Shows.LOST), what, repair_s=DAY_S)
    assert sum(n for (_, rung), n in outcome.recoveries.items() if rung == 4) == 2
    assert outcome.spent_s["fewer"] == pytest.approx(DAY_S / 8, rel=0.02)
    assert outcome.spent_s["nodes"] < 300
    assert outcome.generations == 3


def test_a_hang_costs_its_budget_first() -> None:
    what = setting()
    outcome = after(one(Shows.HANGS), what)
    assert caused(outcome) == {("rank_hung", 2): 1}
    budget_s = max(what.hang.floor_s, what.hang.factor * PLAIN.step_s) + what.hang.confirm_s
    assert outcome.spent_s["detect"] == pytest.approx(budget_s + PLAIN.news_s, abs=0.1)


def test_a_wrong_replica_is_gone_back_from_in_place() -> None:
    outcome = after(one(Shows.CORRUPTS), setting(costs=replace(PLAIN, news_s=0.1)))
    assert caused(outcome) == {("fingerprint_mismatch", 1): 1}
    assert outcome.generations == 1
    assert outcome.spent_s["restore"] == pytest.approx(PLAIN.rewind_s)


def test_a_wrong_replica_that_is_told_of_too_late_takes_a_restart() -> None:
    """Memory keeps the last two snapshots: by the time at which all ranks have the order, they have made two more."""
    outcome = after(one(Shows.CORRUPTS), setting(costs=replace(PLAIN, news_s=3.0)))
    assert caused(outcome) == {("fingerprint_mismatch", 2): 1}
    assert outcome.generations == 2


@pytest.mark.parametrize(("again", "rewinds"), [(False, 1), (True, 3)])
def test_ranks_climb_their_ladder_for_a_spike(again: bool, rewinds: int) -> None:
    outcome = after(one(Shows.SPIKES), setting(), machine=-1, again=again)
    assert caused(outcome) == {("loss_divergence", 1): rewinds}
    assert outcome.generations == 1


def test_a_slow_node_slows_all() -> None:
    outcome = after(one(Shows.SLOWS, factor=1.5, lasts_s=60.0), setting(), lasts_s=7200.0)
    assert caused(outcome) == {("straggler", 0): 1}
    assert outcome.spent_s["stragglers"] == pytest.approx(7200 / 3, rel=0.01)


def test_a_job_that_gives_up_is_started_again_by_somebody() -> None:
    breaks = Model(name="m", sources=(Source(name="x", shows=Shows.CORRUPTS, per_1000_node_days=8000.0),))
    outcome = played(setting(days=2.0), breaks)
    assert {ending.code for ending in outcome.endings} == {7}
    assert outcome.spent_s["operator"] == pytest.approx(PLAIN.operator_s * len(outcome.endings), abs=PLAIN.operator_s)


def test_what_is_lost_while_a_job_waits_for_somebody_does_not_end_it_twice() -> None:
    corrupts = Source(name="x", shows=Shows.CORRUPTS, per_1000_node_days=40_000.0)
    lost = Source(name="y", shows=Shows.LOST, per_1000_node_days=4000.0)
    outcome = played(setting(days=2.0, spares=40), Model(name="m", sources=(corrupts, lost)))
    assert len(outcome.endings) > 3
    assert outcome.spent_s["operator"] == pytest.approx(PLAIN.operator_s * len(outcome.endings), abs=PLAIN.operator_s)


# -- faults -------------------------------------------------------------------------------------------------------------


def test_llama3_gives_what_the_paper_counts() -> None:
    model = fault_models.llama3()
    assert model.per_s(2048) * 54 * DAY_S == pytest.approx(466, rel=0.005)
    drawn = [len(draw(model, 2048, 54 * DAY_S, 1.0, seed)) for seed in range(40)]
    assert sum(drawn) / 40 == pytest.approx(466, abs=3 * sqrt(466 / 40))


def test_stepfuns_lemons_and_clusters() -> None:
    model = fault_models.stepfun()
    drawn = draw(model, 1000, 54 * DAY_S, 40.0, seed=3)
    assert len(drawn) == pytest.approx(4.2 * 54 * 40, rel=0.06)
    counts = sorted((sum(1 for f in drawn if f.machine == m) for m in range(1000)), reverse=True)
    assert sum(counts[:100]) / len(drawn) == pytest.approx(0.41, abs=0.04)


@pytest.mark.parametrize("shape", [0.6, 1.0, 2.0])
def test_the_rate_is_kept_whatever_the_pattern(shape: float) -> None:
    model = replace(DEATHS, pattern=Pattern(shape=shape, clusters=0.3))
    assert len(draw(model, 10, 2000 * DAY_S, 1.0, seed=5)) == pytest.approx(20_000, rel=0.06)


def test_faults_are_the_same_for_the_same_seed_and_others_for_another() -> None:
    model = fault_models.stepfun()
    assert draw(model, 64, 100 * DAY_S, 5.0, 1) == draw(model, 64, 100 * DAY_S, 5.0, 1)
    assert draw(model, 64, 100 * DAY_S, 5.0, 1) != draw(model, 64, 100 * DAY_S, 5.0, 2)


def test_too_many_faults_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^3\.66e\+08 faults are expected, and at most 200000 can be simulated"):
        draw(DEATHS, 100_000, 3660 * DAY_S, 1.0, 0)


# -- itself -------------------------------------------------------------------------------------------------------------

SMALL = ("simulate", "--gpus", "256", "--days", "10", "--faults", "stepfun,failslow,spikes", "--rate", "10", "--json")


def ran(*words: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mt_resilient.cli", *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": hash_seed}
    )


def test_a_seed_gives_the_same_bytes_whatever_the_hash_seed() -> None:
    first, second = ran(*SMALL, "--seed", "7", hash_seed="1"), ran(*SMALL, "--seed", "7", hash_seed="2")
    assert first.returncode == second.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert json.loads(first.stdout)["seed"] == 7
    assert ran(*SMALL, "--seed", "8").stdout != first.stdout


def test_the_table_is_better_towards_fewer_faults_and_shorter_restarts() -> None:
    what = setting(nodes=128, days=5.0, spares=4, costs=Costs())
    cells = sensitivity.table(sensitivity.runs(what, fault_models.llama3(), (30.0, 300.0), (0.0, 600.0), (20.0,)))
    found = {(cell.restart_s, cell.interval_s): cell.effective for cell in cells}
    assert found[30, 0] > found[300, 0] > found[300, 600]
    assert found[30, 0] > found[30, 600]


def test_a_restart_of_the_table_is_no_shorter_than_it_can_be() -> None:
    slow = setting(costs=replace(PLAIN, stop_s=90.0))
    runs = sensitivity.runs(slow, DEATHS, (30.0, 60.0, 120.0), (0.0,), (1.0,))
    assert [run.restart_s for run in runs] == [pytest.approx(slow.costs.restart_s(8, 0) - 0.9, abs=0.1), 120.0]
    for run in runs:
        assert run.setting.costs.restart_s(8, 64) == pytest.approx(run.restart_s, abs=0.1)


def test_spares_of_the_table_have_their_own_faults() -> None:
    pattern = Pattern(repair_median_s=3600.0, repair_p90_s=7200.0)
    lost = Model(name="m", sources=(replace(one(Shows.LOST).sources[0], per_1000_node_days=2.5),), pattern=pattern)
    outcome = played(*sensitivity.varied(setting(nodes=6400, spares=64), lost, 30.0, 0.0, 1.0))
    struck, went = outcome.struck.total(), sum(more > fewer for (_, fewer), (_, more) in pairwise(outcome.out))
    assert 250 < struck < 400
    assert struck <= went < 1.1 * struck


def test_the_table_goes_on_with_fewer_nodes_only_where_it_has_all_of_them() -> None:
    few, many = setting(sizes=(7, 8)), setting(nodes=128, sizes=(127, 128))
    assert [sensitivity.runs(what, DEATHS)[0].setting.sizes for what in (few, many)] == [(7, 8), ()]


def test_what_the_table_cannot_play_is_refused_before_anything_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--gpus", "64", "--spares", "12000", "--sensitivity"]) == 2
    assert capsys.readouterr().err == "mt-resilient: 120000 spares cannot be simulated; 0 to 100000 can\n"


# -- what one may ask for -----------------------------------------------------------------------------------------------

OWN = """
[pattern]
shape = 0.7
[[source]]
name = "GPU"
shows = "dies"
per_1000_node_days = 2.5
lasting = 1
[[source]]
name = "spike"
shows = "spikes"
per_day = 1
"""


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text(OWN)
    model = fault_models.named(f"{tmp_path / 'ours.toml'},failslow")
    assert model.name == "ours+failslow"
    assert model.pattern == Pattern(shape=0.7)
    assert [source.name for source in model.sources] == ["GPU", "spike", "fail-slow"]
    assert model.per_s(1000) == pytest.approx((2.5 + 1 + 5 / 54) / DAY_S)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"dies"', '"dyes"', "shows is 'dyes'; it may be dies"),
        ("lasting", "lastin", "no key 'lastin'; did you mean lasting"),
        ("lasting = 1", "lasting = 2", "it is a share"),
        ("2.5", '"many"', "must be a number"),
        ('name = "GPU"', "", "lacks name"),
        ("per_day = 1", "per_1000_node_days = 1", "spikes strike the job"),
        ("[pattern]", "[patern]", "has patern"),
        ("shape = 0.7", "lemons = 0.1", "go together"),
        ("[[source]]", "[[source", "is not TOML"),
        ("per_1000_node_days = 2.5", "per_day = 2.5", "all others strike nodes"),
        ('"dies"', '"corrupts"', "not replaced if it only corrupts; lasting is for dies"),
        ("shape = 0.7", "shape = 0.005", "0.2 to 100 can be"),
        ("shape = 0.7", "cluster_most = 3000000000", "2 to 1000 faults"),
        ("shape = 0.7", "repair_p90_s = 1e300", "1 to 1e\\+09 can be"),
        (OWN, "source = [1, 2]", "needs at least one"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, before: str, after: str, said: str) -> None:
    (tmp_path / "ours.toml").write_text(OWN.replace(before, after))
    with pytest.raises(UsageError, match=said):
        fault_models.named(str(tmp_path / "ours.toml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--faults", "lama3"), "did you mean llama3?"),
        (("--faults", "llama3,stepfun"), "contains .* twice"),
        (("--gpus", "10"), "Give a multiple of --per-node"),
        (("--gpus", "0"), "--gpus 0 in nodes of 8: there is nothing to simulate. Give 1 or more of each"),
        (("--gpus", "16", "--least", "3"), "is more than the 2 nodes"),
        (("--days", "0"), "more than 0"),
        (("--rate", "-1"), "0 \\(no faults\\)"),
        (("--set", "costs.steps_s=1"), "did you mean step_s?"),
        (("--set", "costs.step_s=0"), "it must be more than 0"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *words]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_no_copies_are_no_buddies(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for more in (("--set", "copies.every_s=0"), ("--set", "costs.copy_s=61"), ("--no-buddies",), ()):
        assert main(["simulate", "--gpus", "64", "--days", "20", "--rate", "50", "--spares", "8", "--json", *more]) == 0
        told.append(capsys.readouterr())
    assert told[0].out == told[1].out == told[2].out != told[3].out
    assert "simulating 20 days of 8 nodes and 8 spares" in told[0].err


def test_a_lease_that_is_configured_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    detect_s = []
    for lease_s in (3, 120):
        words = ("--gpus", "64", "--days", "1", "--rate", "500", "--spares", "64", "--json")
        assert main(["simulate", *words, "--set", f"agent.lease_ttl_s={lease_s}"]) == 0
        detect_s.append(json.loads(capsys.readouterr().out)["spent_s"]["detect"])
    assert detect_s[1] > detect_s[0] + 100
    lost = after(one(Shows.LOST), setting(spares=1, lease_ttl_s=120))
    assert lost.spent_s["detect"] == pytest.approx(120 + PLAIN.news_s)


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate", "--gpus", "64", "--days", "1")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mt_resilient.cli", *words]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 3
    assert len(ended.stderr.splitlines()) == 3
    assert "cannot be written to standard output (No space left on device)" in ended.stderr
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plots)")
    (tmp_path / "effective.svg").mkdir()
    assert main([*words, "--plots", str(tmp_path)]) == 3
    told = capsys.readouterr()
    assert "effective training time" in told.out
    assert "effective.svg cannot be written (Is a directory)" in told.err


def test_a_report_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plots)")
    words = ("--gpus", "64", "--days", "20", "--faults", "llama3,failslow", "--rate", "20", "--spares", "2")
    assert main(["simulate", *words, "--plots", str(tmp_path / "new")]) == 0
    told = capsys.readouterr()
    assert re.search(r"effective training time \d\d\.\d\d%", told.out)
    assert "script_raised" in told.out
    pictures = sorted(tmp_path.glob("new/*.svg"))
    assert [picture.stem for picture in pictures] == ["away", "effective", "losses"]
    assert all(ElementTree.parse(picture).getroot().tag.endswith("svg") for picture in pictures)
    assert all(picture.with_suffix(".png").read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_the_picture_of_a_run_without_incidents_shows_its_effective_time() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plots)")
    from mt_resilient.simulator.results import plots

    outcome = played(setting(days=3.0), fault_models.none())
    [axes] = plots.of(outcome, [])["effective"].axes
    day, share = axes.lines[0].get_xydata()[-1]
    assert (day, share) == (3.0, outcome.effective)
    assert axes.get_ylim()[0] < share <= axes.get_ylim()[1] == 1.0
