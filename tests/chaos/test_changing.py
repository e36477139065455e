"""A state that is more than parameters and moments, and that changes its form on the way: NaN, a killed rank, everything killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..harness import GATED, Job, digest_of, step_lines, undisturbed

CHANGING = Path(__file__).parent / "changing.py"
ADAPTING = Path(__file__).parent / "adapting.py"
ADDING = Path(__file__).parent / "adding.py"


@pytest.mark.variant
def test_it_comes_back_whole(tmp_path: Path) -> None:
    words = ["--steps", "60", "--step-delay", "0.02"]
    expected = undisturbed(CHANGING, *words)
    words += ["--poison", "12", "--marker", str(tmp_path / "poisoned")]
    command = ["--nproc-per-node", "2", str(GATED), str(CHANGING), *words]
    job = Job(tmp_path, command, "--durable-every", "5", GATE_AFTER="28")
    job.until_step(18)
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.min_step >= 25 and all(now.pids))
    job.until_said("step 25 is on disk")
    job.kill_everything()
    job.start()
    assert job.finish(120) == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert [incident.cause for incident in job.faults()] == ["non_finite", "rank_killed", "agent_restarted"]


@pytest.mark.variant
@pytest.mark.parametrize(
    "lazy",
    [
        pytest.param(False, id="a module that is exchanged"),
        pytest.param(True, id="a module that the first forward makes", marks=pytest.mark.variant),
    ],
)
def test_what_a_restart_could_not_make_serves_rewinds_in_place(tmp_path: Path, lazy: bool) -> None:
    """NaN goes back one step, a killed rank or agent to before the change; the end has the same bits each time."""
    words = ["--steps", "60", "--step-delay", "0.02", *(["--lazy"] if lazy else [])]
    expected = undisturbed(ADAPTING, *words)
    words += ["--poison", "20", "--marker", str(tmp_path / "poisoned")]
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(ADAPTING), *words], GATE_AFTER="28")
    job.until(lambda now: now.min_step >= 24 and bool(job.faults()))
    rewound = job.faults()[0]
    assert (rewound.cause, rewound.resume_step) == ("non_finite", 20), rewound
    last = 0 if lazy else 12
    job.until_said(f"step {last} is on disk")
    job.kill_rank(1)
    job.until(lambda now: now.generation == 2 and now.min_step >= 24 and all(now.pids))
    job.kill_everything()
    job.start()
    assert job.finish(120) == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert [incident.cause for incident in job.faults()] == ["non_finite", "rank_killed", "agent_restarted"]
    assert [incident.resume_step for incident in job.faults()] == [20, last, last]
    assert job.said().count("Snapshots from now on serve rewinds in place") == (9 if lazy else 3), (
        "each change, in each life"
    )


@pytest.mark.variant
@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("unused", False),
        *((kind, True) for kind in ("averaging", "no_sync", "views", "fsdp")),
    ],
)
def test_what_lies_between_two_steps_of_an_optimizer(kind: str, in_place: bool, tmp_path: Path) -> None:
    """Each fault is between two of them: sums of gradients, weights that no rank shares yet, a loader that is being iterated. in_place:
    whether wrappers let go of what they have noted of the steps since the last snapshot."""
    words = ["--steps", "70", "--step-delay", "0.1", "--kind", kind]
    expected = undisturbed(ADDING, *words)
    # In a step in which an optimizer steps: otherwise the NaN counts as one that the script itself leaves out.
    words += ["--poison", "15", "--marker", str(tmp_path / "poisoned")]
    command = ["--nproc-per-node", "2", str(ADDING), *words]
    job = Job(tmp_path, command, "--durable-every", "5")
    job.until(lambda now: now.min_step >= 18 and bool(job.faults()) and all(now.pids))
    begun = 1 if in_place else 2
    job.until(lambda now: now.generation == begun and now.min_step >= 18 and all(now.pids))
    job.kill_rank(1)
    job.until(lambda now: now.generation == begun + 1 and now.stepped_s > 0 and all(now.pids))
    job.kill_everything()
    job.start()
    assert job.finish(120) == 0, job.said()
    assert (digest_of(job.printed()), step_lines(job.printed())) == expected
    assert [incident.cause for incident in job.faults()] == [
        "non_finite" if in_place else "state_refused",
        "rank_killed",
        "agent_restarted",
    ]
