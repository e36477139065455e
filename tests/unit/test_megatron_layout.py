"""Numbers of nodes on which Megatron's layout does not fit are left out, so that no start is tried there, or get another layout."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.join.join import agreed
from mt_resilient.agent.join.registration import described, register
from mt_resilient.agent.launch.layout_adviser import question, simumax
from mt_resilient.agent.launch.megatron_layout import Layout, fitting, misfit, others, sentences
from mt_resilient.agent.launch.torchrun import Launch, understand
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.membership.rank_assignment import NodesPolicy
from mt_resilient.resilience.model.node import NodeRecord, Spec
from mt_resilient.resilience.model.types import NodeId
from mt_resilient.resilience.store.codec import dumps, loads
from mt_resilient.resilience.store.keys import Keys
from mt_resilient.resilience.store.seat import Seat

from ..memory_store import MemoryStore

TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
MICRO, WHOLE = "--micro-batch-size", "--global-batch-size"


@pytest.mark.parametrize(
    ("words", "ranks", "why"),
    [
        ("", 24, ""),
        (f"{TP} 8", 24, ""),
        (f"{TP} 2 {PP} 4 {CP} 2", 24, "no multiple of a replica's 16"),
        (f"{TP}=2 {PP}=4 {CP}=2", 32, ""),
        (f"{TP}=7 {TP} 8", 24, ""),
        (f"{TP} 8 {TP}=7", 24, "no multiple of a replica's 7"),
        (f"{TP} 1 {EP} 16", 24, "16 that hold all experts"),
        (f"{TP} 2 {EP} 4", 24, ""),
        (f"{TP} 2 {PP} 2 {EP} 8 {ETP} 1", 24, "16 that hold all experts"),
        (f"{TP} 2 {PP} 2 {EP} 8", 64, ""),
        (f"{MICRO} 1 {WHOLE} 64", 24, "64 does not divide by 24 replicas"),
        (f"{MICRO} 1 {WHOLE} 96", 24, ""),
        (f"{MICRO} 2 {WHOLE} 64 --rampup-batch-size 8 8 1000", 24, ""),
        (f"{WHOLE} 64", 24, ""),
        (f"{TP} two {PP}", 24, ""),
    ],
)
def test_a_layout_fits_or_the_reason_is_said(words: str, ranks: int, why: str) -> None:
    found = misfit(["pretrain_gpt.py", *words.split()], ranks)
    assert why in found if why else not found


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("from megatron.training import pretrain", f"{MICRO} 1 {WHOLE} 64", [3]),
        (
            "from megatron.training import pretrain",
            f"{MICRO} 1 {WHOLE} 7",
            [],
        ),  # nothing would be left: the script shall say
        ("import torch", f"{MICRO} 1 {WHOLE} 64", []),  # another script may mean something else
    ],
)
def test_only_numbers_that_a_megatron_script_cannot_use_are_left_out(
    text: str, words: str, expected: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(text)
    given = launch(script, words)
    fit = fitting(given, (2, 3, 4), None)
    assert sorted({2, 3, 4} - {*fit.numbers}) == expected
    said = [*sentences(given, (2, 3, 4), fit)]
    assert (fit.layouts, len(said)) == ({}, len(expected))
    assert all(sentence.endswith("The job skips this number of nodes") for sentence in said)


def launch(script: Path, words: str) -> Launch:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "8", str(script), *words.split()]
    return understand(command, os.environ)


MODEL = "--num-layers 12 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --num-query-groups 4"
EXPERTS = "--num-experts 8 --sequence-parallel"
BATCH = f"{MICRO} 1 {WHOLE} 96"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{TP} 4 {PP} 4", ["PP 1", "PP 2", "PP 3", "PP 6", "TP 2 PP 3", "TP 2 PP 12", "TP 1 PP 12"]),
        (f"{TP} 4 {PP} 4 --num-layers-per-virtual-pipeline-stage 2", ["PP 2", "PP 3", "PP 6"]),
        (f"{TP} 4 {PP} 4 --account-for-loss-in-pipeline-split", ["TP 2", "TP 1"]),
        (f"{TP} 4 {PP} 4 --ffn-hidden-size 66", ["TP 2 PP 6", "TP 1 PP 2"]),
        (f"{EP} 8 {PP} 2 {EXPERTS}", ["EP 4", "PP 3 EP 2"]),
        (f"{EP} 8 {PP} 2 --num-experts 8", ["EP 4", "PP 1", "PP 3"]),
    ],
)
def test_other_layouts_divide_ranks_layers_heads_experts_and_the_batch(words: str, expected: list[str]) -> None:
    given = ["pretrain_gpt.py", *f"{words} {MODEL} {BATCH}".split()]
    found = [*others(given, 24, 8)]
    assert all(not misfit([*given, *options], 24) for options in found)
    sizes = {" ".join(_short(options)) for options in found}
    assert sizes >= {*expected}
    assert not {"TP 8", "PP 5", "PP 8", "EP 3"} & {size for each in found for size in _short(each)}
    if "virtual" in words:
        assert not any("PP 1" in _short(options) or "PP 4" in _short(options) for options in found)
    if words.endswith("--num-experts 8"):
        assert not any(options[0] == TP for options in found)


def _short(options: Layout) -> list[str]:
    names = {TP: "TP", PP: "PP", EP: "EP"}
    return [f"{names[n]} {v}" for n, v in zip(options[::2], options[1::2], strict=True) if n in names]


def test_the_padded_vocabulary_stays_as_large() -> None:
    given = ["pretrain_gpt.py", *f"{TP} 4 {PP} 4 {MODEL}".split()]
    options = next(each for each in others(given, 24, 8) if _short(each) == ["TP 2", "PP 3"])
    assert options[-2:] == ("--make-vocab-size-divisible-by", "256")


@pytest.mark.parametrize(
    ("answer", "numbers", "sentence"),
    [
        ((PP, "3"), (3, 4), f"On 3 nodes the job trains in another layout: {PP} 3"),
        ((PP, "5"), (4,), "The job skips this number of nodes. No layout"),
        ((), (4,), "The job skips this number of nodes. No layout"),
    ],
)
def test_only_a_layout_that_fits_is_taken_from_an_adviser(
    answer: Layout, numbers: tuple[int, ...], sentence: str, tmp_path: Path
) -> None:
    def adviser(words: Sequence[str], layouts: Mapping[int, Sequence[Layout]]) -> tuple[dict[int, Layout], str]:
        assert list(layouts) == [24]
        return {24: answer}, "No layout"

    script = tmp_path / "pretrain_gpt.py"
    script.write_text("from megatron.training import pretrain")
    given = launch(script, f"{TP} 4 {PP} 4 {MODEL} {BATCH}")
    fit = fitting(given, (3, 4), adviser)
    assert fit.numbers == numbers
    assert sentence in next(sentences(given, (3, 4), fit))
    given = replace(given, layouts=fit.layouts)
    ends = [given.arguments(nodes=n, node_rank=0, master_addr="h", master_port=1, run="r")[-2:] for n in (3, 4)]
    assert ends == [[PP, "3"] if 3 in numbers else [WHOLE, "96"], [WHOLE, "96"]]


def test_an_adviser_gets_only_numbers_that_can_hold_another_layout(tmp_path: Path) -> None:
    def adviser(words: Sequence[str], layouts: Mapping[int, Sequence[Layout]]) -> tuple[dict[int, Layout], str]:
        assert list(layouts) == [24]
        return {}, "None was chosen"

    script = tmp_path / "pretrain_gpt.py"
    script.write_text("from megatron.training import pretrain")
    given = launch(script, f"{TP} 4 {PP} 4 {MODEL} {BATCH}")
    fit = fitting(given, (3, 4, 5), adviser)
    three, five = sentences(given, (3, 4, 5), fit)
    assert three.endswith("The job skips this number of nodes. None was chosen")
    assert five.endswith("number of nodes. No other layout divides the ranks, layers, heads and the batch")


def test_the_first_agent_s_layouts_hold_for_all(tmp_path: Path) -> None:
    """An adviser may answer one agent and not the next."""
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("from megatron.training import pretrain")
    given, keys = launch(script, f"{TP} 4 {PP} 4 {MODEL} {BATCH}"), Keys("job")
    store = MemoryStore(lambda: 0.0)
    spec = described(given, (3, 4))
    alone = agreed(Seat(store, keys, NodeId("a")), given, spec, NodesPolicy())
    assert (alone.numbers, alone.layouts) == ((4,), {})
    first = replace(spec, layouts={3: (PP, "3")}, run="0" * 8)
    me = NodeRecord(instance="a", host="a", pid=1, ranks=8, home="h:a")
    register(Seat(store, keys, NodeId("a")), first, RunDirectory(tmp_path), me, lambda _: None)
    store.put(keys.node(NodeId("a")), dumps(me))
    second = Seat(store, keys, NodeId("b"))
    found = agreed(second, given, spec, NodesPolicy())
    assert (found.numbers, found.layouts) == ((3, 4), {3: (PP, "3")})
    # one that asked at the same moment, and got no answer
    mine = replace(spec, sizes=alone.numbers, layouts=alone.layouts, run="1" * 8)
    joined, _ = register(second, mine, RunDirectory(tmp_path), replace(me, home="h:b"), lambda _: None)
    entry = store.get(keys.spec)
    assert entry
    assert joined == loads(Spec, entry.value) == first
    (told,) = sentences(given, spec.asked, replace(alone, numbers=joined.sizes, layouts=joined.layouts))
    assert told.endswith(f"On 3 nodes the job trains in another layout: {PP} 3")
    # all agents die, and SimuMax would now answer otherwise
    store.delete(keys.node(NodeId("a")))
    assert agreed(second, given, spec, NodesPolicy()).layouts == {}
    again = agreed(second, given, spec, NodesPolicy(simumax_model="m", simumax_system="s"))
    assert (again.numbers, again.layouts) == ((3, 4), {3: (PP, "3")})


def test_simumax_is_asked_with_the_script_s_numbers() -> None:
    words = f"{TP} 4 {PP} 4 {MODEL} {BATCH} --recompute-granularity full --use-distributed-optimizer".split()
    asked = question(words, {24: [(PP, "3")]})
    assert asked["facts"] == {"layer_num": 12, "hidden_size": 64, "head_num": 8, "expert_num": 1}
    assert asked["strategy"]["recompute_granularity"] == "full_block"
    assert (asked["strategy"]["zero_state"], asked["global_batch_size"]) == (1, 96)
    (layout,) = asked["layouts"][24]
    assert (layout["tp_size"], layout["pp_size"], layout["ep_size"]) == (4, 3, 1)


@pytest.mark.parametrize(
    ("words", "full", "layers"),
    [
        ("", False, 4),
        ("--recompute-granularity selective", False, 4),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", True, 4),
        ("--recompute-granularity=full --recompute-method=block --recompute-num-layers=1", True, 1),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 6", True, 4),
    ],
)
def test_simumax_hears_how_many_layers_of_a_stage_are_computed_again(words: str, full: bool, layers: int) -> None:
    asked = question(f"{MODEL} {BATCH} {words}".split(), {24: [(PP, "3")]})
    assert (asked["strategy"]["enable_recompute"], asked["layouts"][24][0]["recompute_layer_num"]) == (full, layers)


@pytest.mark.parametrize(
    ("words", "layouts", "most_s", "why"),
    [
        (f"{TP} 4", {}, 10, "SimuMax was not asked: the arguments do not give --num-layers and"),
        (f"{MODEL} {BATCH}", {}, 10, "No other layout divides"),
        (f"{MODEL} {BATCH}", {24: [(PP, "3")]}, 0.001, "SimuMax did not answer within 0 s"),
        (f"{MODEL} {BATCH}", {24: [(PP, "3")]}, 60, "SimuMax failed: "),
    ],
)
def test_no_answer_of_simumax_is_a_reason(
    words: str, layouts: dict[int, list[Layout]], most_s: float, why: str
) -> None:
    policy = NodesPolicy(simumax_model="/no/model.json", simumax_system="/no/system.json")
    found, said = simumax(policy, words.split(), layouts, most_s)
    assert found == {}
    assert said.startswith(why)


def test_both_descriptions_of_simumax_are_needed() -> None:
    with pytest.raises(UsageError, match="belong together"):
        NodesPolicy(simumax_model="model.json")


SIMUMAX = Path(os.environ.get("SIMUMAX", "/nowhere"))
LLAMA = f"--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 {MICRO} 1 {WHOLE} 96"


@pytest.mark.skipif(not SIMUMAX.exists(), reason="SIMUMAX names no checkout of SimuMax")
@pytest.mark.parametrize(
    ("model", "words", "chosen", "why"),
    [
        ("llama3-8b", f"{LLAMA} {TP} 8 {PP} 4", True, ""),
        ("llama3-70b", f"{LLAMA} {TP} 8 {PP} 4", False, "its model has layer_num 80, and the script 32"),
        (
            "gpt3-175b",
            f"{LLAMA} {TP} 8 {PP} 4".replace(" 32 ", " 96 ").replace("4096", "12288", 1),
            False,
            "SimuMax found no layout that fits into the memory",
        ),
    ],
)
def test_simumax_itself_chooses(
    model: str, words: str, chosen: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs numpy, pandas, sympy, tabulate, graphviz, matplotlib and tqdm."""
    monkeypatch.setenv("PYTHONPATH", f"{SIMUMAX}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    configs = SIMUMAX / "configs"
    described, machine = configs / "models" / f"{model}.json", configs / "system" / "a100_pcie.json"
    policy = NodesPolicy(simumax_model=str(described), simumax_system=str(machine))
    layouts = tuple(others(["x.py", *words.split()], 24, 8))
    found, none = simumax(policy, ["x.py", *words.split()], {24: layouts}, 120)
    assert (found.get(24) in layouts) is chosen, none
    assert chosen or why in none
