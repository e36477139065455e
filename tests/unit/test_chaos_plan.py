"""Plans of `mt-resilient chaos`: read, refused with a sentence, drawn by a seed, shrunk."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mt_resilient.agent.launch.torchrun import understand
from mt_resilient.chaos import settings
from mt_resilient.chaos.campaign import Outcome
from mt_resilient.chaos.command import _folder, _free, _nodes, _shrink, registry
from mt_resilient.chaos.judgement import checker
from mt_resilient.chaos.judgement.draw import delay_s, drawn, settled, shrunk
from mt_resilient.chaos.judgement.plan import ANY, Injection, Kind, Plan, fitting, parsed, to_toml
from mt_resilient.chaos.nemesis.registry import Need
from mt_resilient.chaos.runs import Runs
from mt_resilient.resilience.errors import UsageError
from mt_resilient.run_options import policies

from ..harness import environment

KINDS = {
    kind.name: kind
    for kind in (
        Kind(name="rank_killed", says="", of_a_rank=True),
        Kind(name="agent_killed", says=""),
        Kind(name="etcd_stopped", says="", lasts_s=5.0),
        Kind(name="slow", says="", of_a_rank=True, harmless=True),
        Kind(name="nan_in_gradient", says="", of_a_rank=True, in_place=True),
        Kind(name="node_lost", says="", of_a_node=True, lasts_s=5.0, seeded=False),
        Kind(name="bit_in_moment", says="", of_a_rank=True, seeded=False),
    )
}


def plan(*lines: str) -> Plan:
    return parsed("\n".join(lines), KINDS)


def test_a_plan_is_read() -> None:
    found = plan(
        "seed = 7",
        *("[[fault]]", 'name = "rank_killed"', "rank = 1", "step = 20", "times = 2", "every_steps = 5"),
        *("[[fault]]", 'name = "agent_killed"', 'phase = "restore"'),
        *("[[fault]]", 'name = "etcd_stopped"', "after_s = 1", "for_s = 2"),
        *("[[fault]]", 'name = "node_lost"', "node = 2", "step = 40"),
    )
    assert found.seed == 7
    assert [str(each) for each in found.injections] == [
        "rank_killed rank 1 at step 20",
        "rank_killed rank 1 at step 25",
        "agent_killed in the phase restore of the recovery before",
        "etcd_stopped for 2 s 1 s after the fault before",
        "node_lost node 2 for 5 s at step 40",
    ]
    assert parsed(to_toml(found), KINDS) == found


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["x ="], "it is not TOML"),
        (["speed = 3"], "'speed' is not a part of a plan; its parts are seed and [[fault]]"),
        (["seed = -1"], "seed is -1, and must be a whole number of 0 or more"),
        ([], "it names no fault; write each as [[fault]] with a name"),
        (["[[fault]]", "step = 3"], 'fault 1 has no name, such as name = "rank_killed"'),
        (["[[fault]]", 'name = "rank_kiled"'], "'rank_kiled', which is not a fault (did you mean rank_killed?)"),
        (["[[fault]]", 'name = "agent_killed"', "stp = 3"], "has 'stp', which is not a key (did you mean step?)"),
        (["[[fault]]", 'name = "agent_killed"', 'step = "3"'], "step is '3', and must be a whole number of 0 or more"),
        (["[[fault]]", 'name = "agent_killed"', "times = 0"], "times is 0, and must be a whole number of 1 or more"),
        (["[[fault]]", 'name = "agent_killed"', "step = true"], "step is True, and must be"),
        (["[[fault]]", 'name = "agent_killed"', "rank = 1"], "strikes no single rank; leave rank out"),
        (["[[fault]]", 'name = "agent_killed"', "for_s = 1"], "is over at once; leave for_s out"),
        (["[[fault]]", 'name = "etcd_stopped"', "node = 1"], "strikes no single node; leave node out"),
        (["[[fault]]", 'name = "node_lost"', "node = 0"], "node is 0, and must be a whole number of 1 or more"),
        (["[[fault]]", 'name = "agent_killed"', "after_s = 1"], "after_s has no fault before it to refer to"),
        (
            ["[[fault]]", 'name = "agent_killed"', "[[fault]]", 'name = "rank_killed"', 'phase = "lunch"'],
            "'lunch' is not a phase of a recovery; these are detect, stop, start, build, restore, step, replay",
        ),
        (
            ["[[fault]]", 'name = "slow"', "[[fault]]", 'name = "rank_killed"', 'phase = "build"'],
            "waits for the phase build of the recovery from slow, which restarts no rank (training survives it); use after_s",
        ),
        (
            ["[[fault]]", 'name = "nan_in_gradient"', "[[fault]]", 'name = "rank_killed"', 'phase = "build"'],
            "of the recovery from nan_in_gradient, which restarts no rank (the ranks go back in place)",
        ),
        (["[[fault]]", 'name = "agent_killed"', "every_steps = 5"], "has every_steps without step"),
        (
            ["[[fault]]", 'name = "agent_killed"', "[[fault]]", 'name = "rank_killed"', "after_s = inf"],
            "after_s is inf, and must be a number of 0 or more",
        ),
        (["[[fault]]", 'name = "etcd_stopped"', "for_s = nan"], "for_s is nan, and must be a number of 0 or more"),
        (
            ["[[fault]]", 'name = "agent_killed"', "step = 1", "after_s = 2"],
            "has both step and after_s; it can strike at one moment only",
        ),
    ],
)
def test_a_wrong_plan_is_refused_with_a_sentence(lines: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        plan(*lines)
    assert sentence in str(error.value)
    assert "nothing was started" in str(error.value)


def test_a_plan_strikes_ranks_and_steps_that_there_are() -> None:
    found = plan("[[fault]]", 'name = "rank_killed"', "rank = 2", "step = 50")
    with pytest.raises(UsageError, match="strikes rank 2, and the launch has the ranks 0 to 1"):
        fitting(found, 2)
    assert fitting(found, 3) == found
    lost = plan("[[fault]]", 'name = "node_lost"', "node = 2")
    with pytest.raises(UsageError, match="strikes node 2, and the launch has one node, unless --nodes gives more"):
        fitting(lost, 3)
    assert fitting(lost, 3, nodes=2) == lost
    with pytest.raises(UsageError, match="strikes at step 50, and the training has only 50"):
        settled(found, 3, 50, KINDS)


def test_a_seed_draws_the_same_plan_again_and_only_what_every_script_survives() -> None:
    plans = [drawn(seed, 5, KINDS.values()) for seed in range(50)]
    assert plans == [drawn(seed, 5, KINDS.values()) for seed in range(50)]
    assert len(set(plans)) > 40
    assert {each.fault for one in plans for each in one.injections} == {
        *("rank_killed", "agent_killed", "etcd_stopped"),
        *("slow", "nan_in_gradient"),
    }
    for one in plans:
        assert not one.injections[0].follows
        assert parsed(to_toml(one), KINDS) == one


def test_a_seed_awaits_no_recovery_from_the_end_of_an_agent_that_may_have_stood_by() -> None:
    awaited = {
        spares: {
            before.fault
            for seed in range(50)
            for before, each in pairwise(drawn(seed, 5, KINDS.values(), spares).injections)
            if each.phase
        }
        for spares in (0, 1)
    }
    assert awaited == {0: {"rank_killed", "agent_killed"}, 1: {"rank_killed"}}


def test_what_a_plan_leaves_open_is_chosen_by_its_seed_in_the_order_of_steps() -> None:
    killed = Injection(fault="rank_killed")
    following = Injection(fault="agent_killed", after_s=0.5)
    late = Injection(fault="agent_killed", step=99)
    found = settled(Plan(injections=(late, killed, following), seed=3), 4, 100, KINDS)
    assert found == settled(Plan(injections=(late, killed, following), seed=3), 4, 100, KINDS)
    first, second, third = found.injections
    assert (first.fault, second, third) == ("rank_killed", following, late)
    assert 0 <= first.rank < 4
    assert 15 <= first.step <= 75


def test_a_node_is_chosen_only_if_there_are_several() -> None:
    lost = Plan(injections=(Injection(fault="node_lost"),) * 20)
    assert {each.node for each in settled(lost, 6, 100, KINDS, nodes=3).injections} == {1, 2, 3}
    assert {each.node for each in settled(lost, 2, 100, KINDS).injections} == {ANY}


def test_steps_are_held_up_only_if_the_training_is_too_short() -> None:
    assert delay_s(faults=5, steps=100, took_s=20.0, least_s=8.0) == 0.2
    assert delay_s(faults=5, steps=100, took_s=60.0, least_s=8.0) == 0.0


@pytest.mark.parametrize("needed", [(), ("c",), ("a", "d"), ("a", "b", "c", "d", "e")])
def test_shrinking_keeps_what_is_needed(needed: tuple[str, ...]) -> None:
    assert shrunk(("a", "b", "c", "d", "e"), lambda some: set(needed) <= set(some)) == needed


@pytest.mark.parametrize(
    ("needs", "nodes", "lacking"),
    [
        ((), 1, ""),
        ((Need.NODES,), 1, Need.NODES.value),
        ((Need.NODES,), 2, ""),
        ((Need.ONE_NODE,), 1, ""),
        ((Need.ONE_NODE,), 2, Need.ONE_NODE.value),
        ((Need.NETWORK,), 1, Need.NETWORK.value),
    ],
)
def test_a_fault_is_refused_where_it_cannot_strike(needs: tuple[Need, ...], nodes: int, lacking: str) -> None:
    assert registry.lacks(needs, nodes) == lacking


def test_a_job_of_one_rank_has_no_fault_of_two() -> None:
    assert registry.lacks([Need.RANKS], 1, ranks=1) == "two ranks or more"
    seeded = {ranks: {name for name, kind in registry.kinds(1, ranks).items() if kind.seeded} for ranks in (1, 2)}
    assert seeded[2] - seeded[1] == {"deadlock", "other_collective"}


def test_a_seed_draws_faults_of_nodes_only_for_several_nodes() -> None:
    seeded = {nodes: {name for name, kind in registry.kinds(nodes).items() if kind.seeded} for nodes in (1, 2)}
    assert {"node_lost", "leader_killed"} <= seeded[2] - seeded[1]
    assert seeded[1] - seeded[2] == {"etcd_killed"}


@pytest.mark.parametrize(
    ("option", "nnodes", "nodes"),
    [
        (None, "", 1),
        (None, "2", 2),
        (None, "2:2", 2),
        (None, "1:2", "--nnodes 1:2 is not a fixed number of nodes"),
        (3, "", 3),
        (2, "2", 2),
        (2, "1:3", 2),
        (1, "2", "--nodes 1 contradicts torchrun's --nnodes 2. Nothing was started"),
        (3, "2", "--nodes 3 contradicts torchrun's --nnodes 2. Nothing was started"),
        (1, "2:3", "--nodes 1 contradicts torchrun's --nnodes 2:3. Nothing was started"),
        (0, "2", "--nodes must be 1 or more. Nothing was started"),
    ],
)
def test_the_number_of_nodes(option: int | None, nnodes: str, nodes: int | str) -> None:
    launch = understand(["torchrun", *(["--nnodes", nnodes] if nnodes else []), __file__], {})
    if isinstance(nodes, int):
        assert _nodes(option, launch) == nodes
    else:
        with pytest.raises(UsageError, match=nodes):
            _nodes(option, launch)


@pytest.mark.parametrize("key", ["control.etcd", "control.job", "control.node", "nodes.number", "nodes.spares"])
def test_a_configuration_of_other_nodes_is_refused(key: str) -> None:
    set_so = {key: "3"}
    with pytest.raises(UsageError, match=f"{key} is set in the configuration or the environment, but a campaign has"):
        _free(policies(None, set_so))
    _free(policies(None, {"nodes.join_s": "3"}))


def test_a_directory_that_cannot_be_made_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/below cannot be used \(Not a directory\)\. Nothing was started"):
        _folder(tmp_path / "file" / "below", understand(["torchrun", __file__], {}))


def test_waits_grow_with_the_time_that_a_start_takes() -> None:
    once = Plan(injections=(Injection(fault="rank_killed"),))
    assert "hang.start_s=120" in settings.quick(once, 50, start_s=7.0)
    assert "hang.start_s=600" in settings.quick(once, 50, start_s=200.0)
    assert [settings.patience_s(60.0, start_s) for start_s in (0.0, 30.0)] == [60.0, 90.0]


def test_the_command_that_repeats_a_failure_has_the_options_of_the_first_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The smallest plan so far is in the file after each try; a fault whose moment cannot come any more is not tried."""
    options = ["--set", "hang.floor_s=7", "--config", "/etc/my job.toml"]
    runs = Runs(tmp_path, ["torchrun", __file__], options)
    injections = tuple(Injection(fault=name, step=1) for name in ("slow", "rank_killed", "agent_killed"))
    phase = Injection(fault="rank_killed", rank=0, phase="build")
    tried, kept = list[str](), list[str]()

    def disturbed(smaller: Plan, name: str) -> Outcome:
        tried.append(" ".join(each.fault for each in smaller.injections))
        kept.append((tmp_path / "smallest.toml").read_text())
        return Outcome("", ("promise",) if "slow" in tried[-1] else ())

    campaign: Any = SimpleNamespace(
        runs=runs, root=tmp_path, disturbed=disturbed, settled=lambda _: Plan(injections=(*injections, phase))
    )
    _shrink(campaign, Plan(injections=(*injections, phase)), Outcome("", ("promise",)))
    runs.close()
    assert tried == ["slow rank_killed agent_killed", "slow rank_killed", "slow"]
    assert [text.count("[[fault]]") for text in kept] == [4, 3, 2]
    assert (tmp_path / "smallest.toml").read_text().count("[[fault]]") == 1
    again = f"mt-resilient chaos {tmp_path}/smallest.toml --set hang.floor_s=7 --config '/etc/my job.toml' -- torchrun {__file__}"
    assert again in capsys.readouterr().out


def test_the_folder_of_a_run_s_own_is_there(tmp_path: Path) -> None:
    runs = Runs(tmp_path, ["torchrun", __file__, "--out", "{run}/ckpt"])
    assert runs._words(tmp_path / "clean")[-1] == f"{tmp_path}/clean/own/ckpt"
    assert (tmp_path / "clean" / "own").is_dir()
    runs.close()


def test_planted_bugs_start_with_the_program_as_it_is() -> None:
    script = Path(__file__).parents[2] / "scripts" / "planted-bugs"
    done = subprocess.run([sys.executable, str(script), "none"], text=True, capture_output=True, env=environment())
    assert "there is no bug none; the bugs are skip-fsync" in done.stderr


def test_every_fault_says_what_it_does() -> None:
    kinds = registry.kinds()
    assert len(kinds) >= 50
    assert all(kind.says.endswith(".") and kind.name == name for name, kind in kinds.items())


def test_the_checker_knows_a_fault_that_there_is() -> None:
    assert checker._FORGETS in registry.kinds()
