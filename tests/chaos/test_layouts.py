"""A job begins with another's newest snapshot in another parallel layout: bit for bit the same global tensors, and it trains on.

Without dropout: its generators have no place in another layout.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mt_resilient.checkpoint.backend import place
from mt_resilient.checkpoint.durable import catalog, commit
from mt_resilient.checkpoint.durable.load_resharded import Saved
from mt_resilient.resilience.errors import LayoutError

from ..harness import FSDP, GPT, PLAIN, Job, digest_of, some_of, step_lines, undisturbed

RESHAPED = Path(__file__).parent / "reshaped.py"
STEPS = 6
PAIRS = [
    pytest.param(2, ["--tp", "2"], 2, [], id="TP2 to DP2"),
    pytest.param(2, ["--pp", "2"], 1, [], id="PP2 to PP1", marks=pytest.mark.variant),
    pytest.param(2, ["--ep", "2", "--moe"], 1, ["--moe"], id="EP2 to EP1", marks=pytest.mark.variant),
    pytest.param(2, [], 2, ["--pp", "2"], id="DP2 to PP2", marks=pytest.mark.variant),
]


def train(place: Path, ranks: int, layout: list[str], steps: int, *options: str) -> Job:
    return run(place, ranks, [str(GPT), *layout, "--steps", str(steps), "--dropout", "0"], *options)


def run(place: Path, ranks: int, script: list[str], *options: str) -> Job:
    place.mkdir()
    command = ["--nproc-per-node", str(ranks), *script]
    job = Job(place, command, *options)
    assert job.finish(280) == 0, job.said()[-4000:]
    return job


def saved(job: Job) -> list[Saved]:
    """What it has on disk, newest first. A job that has begun with another's state keeps it before its first step."""
    return [Saved(snapshot) for snapshot in catalog.committed(place.at(str(job.directory)))]


def newest(job: Job) -> Saved:
    return saved(job)[0]


@pytest.mark.variant
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "other_ranks", "other_layout"), PAIRS)
def test_the_same_tensors_in_another_layout(
    tmp_path: Path, ranks: int, layout: list[str], other_ranks: int, other_layout: list[str]
) -> None:
    first = train(tmp_path / "first", ranks, layout, STEPS)
    here = train(tmp_path / "here", ranks, layout, STEPS + 2, "--start-from", str(first.directory))
    there = train(tmp_path / "there", other_ranks, other_layout, STEPS + 2, "--start-from", str(first.directory))
    taken_over = saved(there)[-1]
    assert taken_over.digest() == newest(first).digest()
    assert len(newest(first).boxes) > 40
    assert commit.read_commit(taken_over.snapshot).world == other_ranks
    losses = [
        [float(re.search(r"loss (\S+)", line)[1]) for line in step_lines(further.printed())]
        for further in (here, there)
    ]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5), "a mapping that is wrong both ways would show here"


@pytest.mark.variant
@pytest.mark.megatron
@pytest.mark.slow
def test_flat_shards_of_four_ranks_go_to_two_and_to_three(tmp_path: Path) -> None:
    """The distributed optimizer's shards cut through parameters, elsewhere for each number of ranks."""
    samples = ["--gbs", "24", "--mbs", "1"]
    four = train(tmp_path / "four", 4, samples, 3)
    two = train(tmp_path / "two", 2, samples, 3, "--start-from", str(four.directory))
    three = train(tmp_path / "three", 3, samples, 3, "--start-from", str(two.directory))
    assert newest(four).digest() == newest(two).digest() == newest(three).digest()
    assert {len(newest(job).manifests) for job in (four, two, three)} == {4, 2, 3}


@pytest.mark.variant
@pytest.mark.slow
def test_dtensors_of_four_ranks_go_to_three_and_to_two_copies_on_two_each(tmp_path: Path) -> None:
    script = [str(FSDP), "--steps", "3"]
    four = run(tmp_path / "four", 4, script)
    three = run(tmp_path / "three", 3, script, "--start-from", str(four.directory))
    copies = run(tmp_path / "copies", 4, [*script, "--replicate", "2"], "--start-from", str(three.directory))
    assert newest(four).digest() == newest(three).digest() == newest(copies).digest()
    assert digest_of(four.printed()) == digest_of(three.printed()) == digest_of(copies.printed())


@pytest.mark.variant
@pytest.mark.slow
def test_a_model_that_says_nothing_of_places_goes_on_where_all_ranks_held_the_same(tmp_path: Path) -> None:
    """Gradients are added up by the script: nothing about the model tells that its copies are copies."""
    three = run(tmp_path / "three", 3, [str(PLAIN), "--steps", "4"])
    two = run(tmp_path / "two", 2, [str(PLAIN), "--steps", "8"], "--start-from", str(three.directory))
    one = run(tmp_path / "one", 1, [str(PLAIN), "--steps", "12"], "--start-from", str(two.directory))
    assert digest_of(one.printed()) == undisturbed(PLAIN, "--steps", "12", ranks=1)[0]


COMES_OVER = (
    *("extra-tensor", "extra-value", "frozen", "adafactor", "bytes", "counted", "counting", "declaring"),
    *("lookahead", "loose", "plain-sgd", "tensor-rate", "two-groups"),
)
STAYS = {
    "extra-apart": "the extra state of the module 'module.0' of 'models.extra-apart' differs from rank to rank",
    "sharded-lookahead": "the state of 'optimizers.sharded-lookahead' differs from rank to rank",
}


def held(job: Job, when: str, rank: int = 0) -> dict[str, str]:
    """What that rank has told of each case."""
    found = re.findall(rf"^{when} {rank} (\S+) (\w+)$", job.printed(), re.MULTILINE)
    assert found, job.printed()[-2000:]
    return dict(found)


@pytest.mark.variant
def test_all_that_ranks_hold_alike_comes_over_to_fewer_and_to_more(tmp_path: Path) -> None:
    """What modules keep beside parameters and buffers, flags, and whatever optimizers of other people's have."""
    two = run(tmp_path / "two", 2, [str(RESHAPED), *COMES_OVER, "--steps", "4"])
    one = run(tmp_path / "one", 1, [str(RESHAPED), *COMES_OVER, "--steps", "7"], "--start-from", str(two.directory))
    assert held(one, "begins") == held(two, "ends")
    more = run(tmp_path / "more", 2, [str(RESHAPED), *COMES_OVER, "--steps", "8"], "--start-from", str(one.directory))
    assert held(more, "begins") == held(more, "begins", 1) == held(one, "ends")


@pytest.mark.variant
@pytest.mark.parametrize("case", some_of(STAYS))
def test_what_is_a_rank_s_alone_is_named_before_the_first_step(tmp_path: Path, case: str) -> None:
    two = run(tmp_path / "two", 2, [str(RESHAPED), case, "--steps", "4"])
    command = ["--nproc-per-node", "1", str(RESHAPED), case, "--steps", "6"]
    (tmp_path / "one").mkdir()
    one = Job(tmp_path / "one", command, "--start-from", str(two.directory))
    assert one.finish(120) == LayoutError.exit_code, one.said()
    assert STAYS[case] in one.said().splitlines()[-1], one.said()[-2000:]
    assert "begins" not in one.printed()


@pytest.mark.variant
def test_a_buffer_that_differs_is_the_first_rank_s_and_told(tmp_path: Path) -> None:
    two = run(tmp_path / "two", 2, [str(RESHAPED), "buffer-apart", "--steps", "4"])
    one = run(tmp_path / "one", 1, [str(RESHAPED), "buffer-apart", "--steps", "6"], "--start-from", str(two.directory))
    assert held(one, "begins") == held(two, "ends") != held(two, "ends", 1)
    said = "the buffer seen of 'models.buffer-apart' differs from rank to rank in the snapshot: all ranks continue with the"
    assert one.said().count(said) == 1
