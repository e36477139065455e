"""Real, unmodified Megatron loops under `mt-resilient run`, killed and poisoned: losses and final state bit by bit those of the
undisturbed run under plain torchrun."""

from __future__ import annotations

from pathlib import Path

import pytest

from .loops import (
    BRIDGE_DP2,
    CHECKOUT_DP2,
    CHECKOUT_LOOPS,
    LOOPS,
    MEGATRON_DP2,
    MEGATRON_INTERLEAVED,
    MEGATRON_RAMPED,
    MEGATRON_TP2_PP2,
    OWN_LOOP_DP2,
    Loop,
    behind,
    read_record,
    undisturbed,
)

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

LEAVE_OUT = (MEGATRON_DP2, MEGATRON_INTERLEAVED, MEGATRON_RAMPED, BRIDGE_DP2)
OFTEN = (MEGATRON_TP2_PP2,)
ALL = [
    pytest.param(OWN_LOOP_DP2, id=OWN_LOOP_DP2.name, marks=pytest.mark.variant),
    *(pytest.param(loop, id=loop.name, marks=() if loop in OFTEN else pytest.mark.variant) for loop in LOOPS),
    *(
        pytest.param(loop, id=loop.name, marks=[pytest.mark.mlm, *([pytest.mark.variant] if at else [])])
        for at, loop in enumerate(CHECKOUT_LOOPS)
    ),
]


@pytest.mark.parametrize("loop", ALL)
def test_killed_and_poisoned(loop: Loop, tmp_path: Path) -> None:
    reason = loop.missing()
    if reason is not None:
        pytest.skip(reason)
    expected, _ = undisturbed(loop)
    place = tmp_path / "disturbed"
    job = behind(loop, place, "--durable-every", "5", nemesis="nan-grad@4:1,kill@9:0")
    assert job.finish(280) == 0, job.said()[-4000:]
    found = read_record(place)
    assert found.losses == expected.losses
    assert found.digests == expected.digests
    assert found.digests.keys() == set(range(loop.ranks))
    told = [(incident.cause, incident.rung, incident.ranks) for incident in job.faults()]
    assert told == [("non_finite", 1, (1,)), ("rank_killed", 2, ())]


@pytest.mark.variant
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(MEGATRON_DP2, id=MEGATRON_DP2.name),
        pytest.param(CHECKOUT_DP2, id=CHECKOUT_DP2.name, marks=pytest.mark.mlm),
    ],
)
def test_the_agent_is_killed_and_the_same_command_goes_on(loop: Loop, tmp_path: Path) -> None:
    if reason := loop.missing():
        pytest.skip(reason)
    expected, _ = undisturbed(loop)
    place = tmp_path / "disturbed"
    job = behind(loop, place, "--durable-every", "5", nemesis="hang@8:0")
    job.until_said("step 5 is on disk")
    job.agent.kill()
    job.agent.wait()
    job.start()
    assert job.finish(280) == 0, job.said()[-4000:]
    assert "generation 2: 2 ranks start from step 5" in job.said()
    assert read_record(place) == expected


@pytest.mark.variant
@pytest.mark.parametrize("saves", [True, False])
def test_an_external_loader_goes_on_where_it_was_or_the_incident_says_so(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := OWN_LOOP_DP2.missing():
        pytest.skip(reason)
    external = ("--dataloader-type", "external")
    expected, _ = undisturbed(OWN_LOOP_DP2, *external)
    if not saves:
        monkeypatch.setenv("PLAIN_LOADER", "1")
    place = tmp_path / "disturbed"
    job = behind(OWN_LOOP_DP2, place, arguments=external, nemesis="kill@8:0")
    assert job.finish(280) == 0, job.said()[-4000:]
    assert (read_record(place) == expected) is saves
    assert ("no recovery can put it back" in job.said()) is not saves
    assert ("could not be put back" in job.said()) is not saves


@pytest.mark.variant
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(MEGATRON_DP2, id=MEGATRON_DP2.name),
        pytest.param(BRIDGE_DP2, id=BRIDGE_DP2.name, marks=pytest.mark.variant),
    ],
)
def test_hung(loop: Loop, tmp_path: Path) -> None:
    reason = loop.missing()
    if reason is not None:
        pytest.skip(reason)
    expected, _ = undisturbed(loop)
    place = tmp_path / "disturbed"
    job = behind(
        loop,
        place,
        "--set",
        "hang.floor_s=3",
        "--set",
        "hang.confirm_s=1",
        "--set",
        "hang.idle_s=1",
        nemesis="hang@9:1",
    )
    assert job.finish(280) == 0, job.said()[-4000:]
    assert read_record(place) == expected
    (incident,) = job.faults()
    assert (incident.cause, incident.rung) == ("rank_hung", 2)
    assert incident.summary.startswith("rank 1 on ")
    assert "in start_grad_sync" in incident.summary
    assert any("rank 0 on " in line and "waits for it" in line for line in incident.evidence)


@pytest.mark.variant
@pytest.mark.parametrize("loop", [pytest.param(loop, id=loop.name) for loop in LEAVE_OUT])
def test_data_that_gives_nan_is_left_out(loop: Loop, tmp_path: Path) -> None:
    """NaN at two replays too: its batch is left out. The run ends as one that has never had that batch, a kill behind it or not."""
    if (reason := loop.missing()) is not None:
        pytest.skip(reason)
    records = []
    for name, options, nemesis in (("hit", [], "nan-grad*3@4:1,kill@9:0"), ("clean", ["--skip-data", "3:4"], "")):
        place = tmp_path / name
        job = behind(loop, place, "--durable-every", "5", *options, nemesis=nemesis)
        assert job.finish(280) == 0, job.said()[-4000:]
        records.append((read_record(place), [(i.cause, i.remedy) for i in job.faults()]))
    (hit, told), (clean, nothing) = records
    remedies = [("non_finite", remedy) for remedy in ("replay", "replay earlier", "skip")]
    assert told == [*remedies, ("rank_killed", "")]
    assert nothing == []
    assert hit.losses == clean.losses
    assert hit.digests == clean.digests


@pytest.mark.variant
@pytest.mark.parametrize(
    ("loop", "windows", "faults"),
    [
        pytest.param(MEGATRON_DP2, ("0:2", "7:9"), "nan-grad@1:1,nan-grad@6:1,kill@7:0", id=MEGATRON_DP2.name),
        pytest.param(MEGATRON_RAMPED, ("3:4",), "kill@5:1", id=MEGATRON_RAMPED.name),
    ],
)
def test_a_step_back_to_where_data_is_left_out(
    loop: Loop, windows: tuple[str, ...], faults: str, tmp_path: Path
) -> None:
    """The snapshot is of the state before the data was left out: going back to it leaves out the same again, and no more."""
    if (reason := loop.missing()) is not None:
        pytest.skip(reason)
    records = []
    for name, nemesis in (("hit", faults), ("clean", "")):
        place = tmp_path / name
        options = [word for window in windows for word in ("--skip-data", window)]
        job = behind(loop, place, *options, nemesis=nemesis)
        assert job.finish(280) == 0, job.said()[-4000:]
        records.append(read_record(place))
    hit, clean = records
    assert hit.losses == clean.losses
    assert hit.digests == clean.digests
