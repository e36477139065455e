"""Wrong input and a hostile machine: one plain sentence, the right exit code, nothing lost."""

from __future__ import annotations

import mmap
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from mt_resilient.agent.loop.decision_failures import PATIENCE_S
from mt_resilient.agent.output.async_output import LAST_S, Notebook
from mt_resilient.agent.run_directory import RunDirectory
from mt_resilient.resilience.errors import BudgetSpent, InternalError
from mt_resilient.resilience.ipc.board_events import PAGE_BYTES
from mt_resilient.resilience.ipc.board_layout import Page
from mt_resilient.resilience.store.etcd.client import EtcdStore
from mt_resilient.resilience.store.keys import Keys

from ..etcd_cluster import Cluster, eventually
from ..harness import BIN, GATED, GPT, MINIMAL, Job, cli, digest_of, environment, step_lines, undisturbed

TRAIN = ("--", "torchrun", "--nproc-per-node", "2", str(MINIMAL), "--steps", "5")


def refused(code: int, sentence: str, *words: str, **extra: str) -> None:
    done = cli(*words, **extra)
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    assert sentence in lines[0]


def test_an_unknown_option_names_itself() -> None:
    refused(2, "unrecognized arguments: --snapshot-evry", "run", "--snapshot-evry", "3", *TRAIN)


def test_a_wrong_configuration_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "mt.toml"
    file.write_text("[snapshots]\nevery_step = 3\n")
    refused(2, "did you mean every_steps?", "run", "--config", str(file), *TRAIN)


def test_a_missing_script(tmp_path: Path) -> None:
    refused(2, "nowhere.py is not there", "run", "--run-dir", str(tmp_path), "--", "torchrun", "nowhere.py")


def test_a_command_that_is_no_torchrun(tmp_path: Path) -> None:
    refused(2, "deepspeed starts the ranks by itself", "run", "--run-dir", str(tmp_path), "--", "deepspeed", "train.py")


def test_torchrun_not_found(tmp_path: Path) -> None:
    refused(
        3, "was not found on PATH", "run", "--run-dir", str(tmp_path), "--", str(tmp_path / "torchrun"), str(MINIMAL)
    )


def test_an_etcd_endpoint_that_does_not_answer(tmp_path: Path) -> None:
    done = cli("run", "--run-dir", str(tmp_path), "--etcd", "127.0.0.1:1", "--set", "control.join_wait_s=5", *TRAIN)
    waits, why = done.stderr.splitlines()
    assert done.returncode == 4
    assert "Waiting for it, for at most 5 s" in waits
    assert "127.0.0.1:1" in why


def test_an_agent_waits_for_an_etcd_that_is_started_later(tmp_path: Path) -> None:
    late = Cluster(tmp_path, 1)
    three = f"127.0.0.1:1,127.0.0.1:2,{late.endpoints[0]}"  # a call asks two of them
    words = [BIN / "mt-resilient", "run", "--run-dir", tmp_path / "run", "--job", "late", "--etcd", three, *TRAIN]
    said = tmp_path / "said"
    with said.open("w") as errors:
        agent = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=errors)
    try:
        eventually(lambda: "Waiting for it, for at most 60 s" in said.read_text())
        late.start()
        assert agent.wait(300) == 0, said.read_text()
    finally:
        agent.kill()
        late.stop()


@pytest.mark.variant
def test_two_etcds_that_know_nothing_of_each_other(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = (Cluster(tmp_path / name, 1).start().ready() for name in "ab")
    both = ",".join((*one.endpoints, *other.endpoints))
    done = cli("run", "--run-dir", str(tmp_path / "run"), "--etcd", both, *TRAIN)
    one.stop()
    other.stop()
    assert done.returncode == 2, done.stderr
    what = f"the first endpoint knows this job, and {other.endpoints[0]} does not; nothing was started"
    assert what in done.stderr.splitlines()[-1]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a read-only file system")
def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    sealed = tmp_path / "sealed"
    sealed.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", sealed], check=True)
    try:
        refused(3, "run directory", "run", "--run-dir", str(sealed / "run"), *TRAIN)
        refused(3, "snapshot directory", "run", "--run-dir", str(tmp_path / "run"), "--snapshots", str(sealed), *TRAIN)
    finally:
        subprocess.run(["umount", "--lazy", sealed], check=True)


@pytest.mark.variant
def test_two_agents_in_one_run_directory(tmp_path: Path) -> None:
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "40", "--step-delay", "0.02"])
    job.until(lambda now: now.generation == 1)
    refused(2, "another mt-resilient is running", "run", "--run-dir", str(job.directory), *TRAIN)
    assert job.finish() == 0


@pytest.mark.variant
def test_a_run_directory_and_snapshots_of_another_job(tmp_path: Path) -> None:
    job = Job(tmp_path, ["--nproc-per-node", "2", str(MINIMAL), "--steps", "3"])
    assert job.finish() == 0
    refused(2, "belongs to another command", "run", "--quiet", "--run-dir", str(job.directory), *TRAIN)
    other = ("--run-dir", str(tmp_path / "other"), "--snapshots", str(job.directory))
    refused(2, "are another job's", "run", *other, *TRAIN)


@contextmanager
def store_of(job: Job) -> Iterator[tuple[EtcdStore, Keys]]:
    told = RunDirectory(job.directory).agent()
    assert told
    with closing(EtcdStore(told["endpoints"], deadline_s=2.0)) as store:
        yield store, Keys(told["job"])


@pytest.mark.variant
def test_what_nobody_can_read_in_the_store_ends_no_training(tmp_path: Path) -> None:
    train = (MINIMAL, "--steps", "410", "--step-delay", "0.03")
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), *map(str, train)], GATE_AFTER="400")
    job.until_step(2)
    with store_of(job) as (store, keys):
        for key in (keys.requests + "1", keys.generation):
            kept, times = store.get(key), job.said().count("can judge faults again")
            store.put(key, b"garbage")
            job.until_said(f"the agent cannot judge faults at present: InternalError: {key}: cannot read")
            done = len(step_lines(job.printed()))
            time.sleep(1.5)
            assert len(step_lines(job.printed())) > done, job.said()
            store.put(key, kept.value) if kept else store.delete(key)
            job.until_said("the agent can judge faults again", times=times + 1)
        job.kill_rank(1)
        job.until(lambda now: now.generation == 2)
        assert job.finish() == 0
    assert digest_of(job.printed()) == undisturbed(*train)[0]
    assert [incident.rung for incident in job.faults()] == [2]


@pytest.mark.variant
def test_ranks_do_not_wait_for_ever_for_a_judgement_that_fails(tmp_path: Path) -> None:
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "40", "--step-delay", "0.02"])
    pid = job.until_step(2).pids[1]
    with store_of(job) as (store, keys):
        store.put(keys.requests + "1", b"garbage")
        job.until_said("the agent cannot judge faults")
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert job.agent.wait(60) == InternalError.exit_code
        assert time.monotonic() - killed_s > PATIENCE_S
    assert "Report this" in job.said()


@pytest.mark.variant
def test_who_wants_to_leave_does_not_wait_for_a_judgement_that_fails(tmp_path: Path) -> None:
    job = Job(tmp_path, ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "40", "--step-delay", "0.02"])
    job.until_step(2)
    with store_of(job) as (store, keys):
        store.put(keys.requests + "1", b"garbage")
        job.until_said("the agent cannot judge faults")
        job.agent.send_signal(signal.SIGTERM)
        assert job.agent.wait(30) == 128 + signal.SIGTERM
    assert "the agent cannot judge faults: the agent ends its ranks at once" in job.said()


@pytest.mark.variant
def test_a_script_that_fails_at_import_stops_the_second_time(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_at_all\n")
    job = Job(tmp_path, ["--nproc-per-node", "2", str(script)])
    assert job.finish() == 5
    last = job.said().strip().splitlines()[-1]
    assert "No module named 'no_such_module_at_all'" in last
    assert "the script failed 2 times in the same way before it reported a step" in last


@pytest.mark.variant
def test_a_crash_loop_without_progress_stops(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    source = MINIMAL.read_text().replace(
        "        optimizer.step()\n", "        assert step < 4, 'poisoned sample'\n        optimizer.step()\n"
    )
    assert "poisoned sample" in source
    script.write_text(source)
    job = Job(tmp_path, ["--nproc-per-node", "2", str(script), "--steps", "9"])
    assert job.finish() == 93
    assert "3 restarts in a row did not get beyond the snapshot of step 3: 3 × script raised" in job.said()
    assert [incident.rung for incident in job.faults()] == [2, 2, 2, 6]


UNSAVED = """
import sys, time
import torch
from mt_resilient import Session

class Layer:  # its state cannot be saved while it is sparse
    def __init__(self, sparse):
        self.steps, self.sparse = 0, sparse
    def state_dict(self):
        self.steps += 1
        print("tried", flush=True)
        return {"x": torch.eye(3).to_sparse() if self.steps in self.sparse else torch.eye(3)}
    def load_state_dict(self, kept):
        pass

class Raises:
    def __init__(self, steps):
        self.steps, self.failing = 0, steps
    def state_dict(self):
        self.steps += 1
        if self.steps in self.failing:
            raise RuntimeError("no state now")
        return {}
    def load_state_dict(self, kept):
        pass

session = Session(layer=eval(sys.argv[1]))
steps, delay_s = sys.argv[2:] or (6, 0)
for step in session.steps(int(steps)):
    time.sleep(float(delay_s))
    print("step", step, flush=True)
"""


def test_a_state_that_can_never_be_saved_is_told_before_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "unsaved.py"
    script.write_text(UNSAVED)
    job = Job(tmp_path, ["--nproc-per-node", "1", str(script), "Layer(range(99))"])
    assert job.finish() == 2, job.said()
    assert "layer['x'], a torch.Tensor, can't be saved: it is not dense (torch.sparse_coo)" in job.said()
    assert "step" not in job.printed()


@pytest.mark.variant
def test_a_state_dict_that_fails_is_told_before_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "unsaved.py"
    script.write_text(UNSAVED)
    job = Job(tmp_path, ["--nproc-per-node", "1", str(script), "Raises(range(99))"])
    assert job.finish() == 2, job.said()
    assert (
        "layer can't be saved: it does not give its state (RuntimeError: no state now, unsaved.py line " in job.said()
    )
    assert "step" not in job.printed()


@pytest.mark.parametrize("kind", ["Layer", pytest.param("Raises", marks=pytest.mark.variant)])
def test_a_state_that_can_for_a_while_not_be_saved_costs_snapshots_and_no_step(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "unsaved.py"
    script.write_text(UNSAVED)
    job = Job(tmp_path, ["--nproc-per-node", "1", str(script), f"{kind}(range(3, 6))"])
    assert job.finish() == 0, job.said()
    assert [line for line in job.printed().splitlines() if "step" in line] == [f"step {step}" for step in range(6)]
    assert (job.said() + job.printed()).count("Training goes on without new snapshots") == 1


SPARSE_BUFFER = """
import torch
from mt_resilient import Session

model = torch.nn.BatchNorm1d(3)
session = Session(model=model)
for step in session.steps(6):
    model.running_mean = torch.zeros(3).to_sparse() if step == 2 else torch.zeros(3)
    print("step", step, flush=True)
"""


@pytest.mark.variant
def test_a_buffer_that_can_for_a_while_not_be_saved_ends_no_training(tmp_path: Path) -> None:
    script = tmp_path / "sparse_buffer.py"
    script.write_text(SPARSE_BUFFER)
    job = Job(tmp_path, ["--nproc-per-node", "1", str(script)], "--snapshot-every", "1")
    assert job.finish() == 0, job.said()
    assert [line for line in job.printed().splitlines() if "step" in line] == [f"step {step}" for step in range(6)]
    assert "the buffer running_mean, a torch.Tensor, can't be saved: it is not dense (torch.sparse_coo)" in job.said()


@pytest.mark.variant
def test_a_state_that_can_no_longer_be_saved_is_tried_when_a_snapshot_is_due_and_named_at_the_end(
    tmp_path: Path,
) -> None:
    script = tmp_path / "unsaved.py"
    script.write_text(UNSAVED)
    command = ["--nproc-per-node", "1", str(script), "Layer(range(2, 99))", "42", "0"]
    job = Job(tmp_path, command, "--snapshot-every", "1000", "--durable-every", "10")
    assert job.finish() == 0, "as under plain torchrun, and no new start could mend it"
    assert job.printed().count("tried") == 6, "at the steps 0, 10, 20, 30, 40 and 42"
    assert (job.said() + job.printed()).count("Training goes on without new snapshots") == 1
    last = job.said().splitlines()[-1]
    assert (
        "the training is over. No snapshot contains the last state (step 42: layer['x'], a torch.Tensor, can't be saved"
        in last
    )
    assert "it is not dense (torch.sparse_coo)" in last


@pytest.mark.variant
def test_a_last_snapshot_of_a_state_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    script = tmp_path / "unsaved.py"
    script.write_text(UNSAVED)
    command = ["--nproc-per-node", "1", str(script), "Layer(range(8, 9999))", "9999", "0.01"]
    job = Job(tmp_path, command, "--durable-every", "5", "--last-snapshot")
    job.until_said("step 5 is on disk")
    job.until_step(20)
    job.agent.send_signal(signal.SIGTERM)
    assert job.finish() == 143, job.said()
    last = job.said().splitlines()[-1]
    assert "ended, stopped by SIGTERM, but without the last snapshot (step " in last
    assert "layer['x'], a torch.Tensor, can't be saved: it is not dense (torch.sparse_coo)" in last
    assert re.search("; the same command continues from step [67]$", last), "what memory still held is on disk"
    assert last[last.index("ended") :] in cli("status", "--run-dir", str(job.directory)).stdout


CATCHES = """
    try:
        main()
    except Exception as error:
        print(f"the script caught {error!r}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "code", "rungs", "catches"),
    [
        pytest.param("session.data_step", 0, [1, 1, 1], False, marks=pytest.mark.variant),
        pytest.param("step", BudgetSpent.exit_code, [1, 1, 2, 6], False, marks=pytest.mark.variant),
        ("step", BudgetSpent.exit_code, [1, 1, 2, 6], True),
    ],
    ids=["known data", "other data", "a script that catches every exception and exits with 0"],
)
def test_a_nan_at_every_replay_ends_the_job_or_its_data(
    data: str, code: int, rungs: list[int], catches: bool, tmp_path: Path
) -> None:
    """The data is left out, where it is known which it is."""
    script = GPT.with_name(f"persistent-{os.getpid()}.py")
    source = GPT.read_text().replace('f"poisoned-{number}")', 'f"poisoned-{number}-{time.time()}")')
    assert source != GPT.read_text()
    source = source.replace("train_step(session.data_step)", f"train_step({data})")
    if catches:
        assert source.endswith("\n    main()\n")
        source = source.removesuffix("    main()\n") + CATCHES
    script.write_text(source)
    try:
        poison = ["--poison-gradient", "4:1", "--poison-marker", str(tmp_path)]
        job = Job(tmp_path, ["--nproc-per-node", "2", str(script), "--steps", "12", *poison])
        assert job.finish() == code
    finally:
        script.unlink()
    assert [incident.rung for incident in job.faults()] == rungs
    if code:
        done = "after 2 rewinds with unknown data; the ranks have tried every remedy"
        assert f"again, {done}. Check the model, its settings and its data" in job.said().splitlines()[-1]
        assert job.said().count("no recovery can put it back: get the batches") == 1
        assert not re.search("same data|hardware", job.said() + cli("explain", "--run-dir", str(job.directory)).stdout)
    else:
        assert "it recurred with the data, and not without it" in job.said()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_is_told_and_costs_no_step(tmp_path: Path, small_disk: Path) -> None:
    expected, _ = undisturbed(MINIMAL, "--steps", "60")
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "5", "--snapshots", str(small_disk), GATE_AFTER="8")
    job.until_said("is on disk")
    ballast = small_disk / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=64k"], capture_output=True, check=False)
    job.gate.touch()
    job.until_said("could not be written")
    ballast.unlink()
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert "step 60 is on disk" in job.said()


def test_a_full_run_directory_and_its_etcd_are_named_and_the_end_waits_for_room(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    disk = tmp_path / "run"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", disk], check=True)
    try:
        command = ["--nproc-per-node", "1", str(GATED), str(MINIMAL), "--steps", "40"]
        job = Job(tmp_path, command, "--no-warm", "--snapshots", str(tmp_path / "snapshots"))
        job.until_step(29)
        etcd = next(child for child, said in job.children() if "etcd" in said["name"])
        etcd.suspend()  # when it has to write, and so ends itself, is chance: its files have some room
        ballast = disk / "ballast"
        subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True, check=False)
        job.until_said("is full")
        job.gate.touch()
        job.until_said("the training has reached its end, and the job ends once etcd is back")
        ballast.unlink()
        etcd.kill()
        assert job.finish() == 0, job.said()
        assert "step 40 is on disk" in job.said()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.variant
def test_a_disk_that_stays_full_at_the_end_is_no_end(tmp_path: Path, small_disk: Path) -> None:
    """What cannot be written at the end is tried for 15 s; then the run says that it is not finished, and can be given again. (That memory
    was short once is no excuse; the next tests have it without.)"""
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "40"]
    job = Job(tmp_path, command, "--durable-every", "10", "--snapshots", str(small_disk))
    job.until_said("is on disk")
    job.until_step(29)
    page_of(job.agent.pid).starved += 1
    ballast = small_disk / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True, check=False)
    assert job.finish() == 3, job.said()
    assert "their last state is not on disk (step 40:" in job.said().splitlines()[-1]
    ballast.unlink()
    job.start()
    assert job.finish() == 0, job.said()
    assert "step 40 is on disk" in job.said()
    job.start()
    assert job.finish() == 2


LEAVES = """
import os, time
import torch
from mt_resilient import Session
from mt_resilient.training.boundary.step_metrics import Figures

class Layer:
    def state_dict(self):
        return {"x": torch.rand(99)}
    def load_state_dict(self, kept):
        pass

session = Session(layer=Layer())
step = session.begin(session.restore() or 0)
while step < 30:  # as a loop of Megatron's does, whose time is up there
    while step == 21 and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.02)
    step += 1
    session.boundary(step, Figures(), judged_now=step == 30, last=step == 30)
session.finish(complete=False)
"""


@pytest.mark.variant
def test_a_script_that_leaves_early_while_the_disk_is_full_does_not_go_on_from_there(
    tmp_path: Path, small_disk: Path
) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    job = Job(
        tmp_path,
        ["--nproc-per-node", "1", str(script)],
        "--durable-every",
        "10",
        "--snapshots",
        str(small_disk),
    )
    job.until_said("step 20 is on disk")
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk / 'ballast'}", "bs=4k"], capture_output=True, check=False)
    assert job.finish() == 3, job.said()
    last = job.said().splitlines()[-1]
    assert "their last state is not on disk (step 30:" in last
    assert last.endswith("give the same command again: it continues from step 20")
    (small_disk / "ballast").unlink()
    job.start()
    assert job.finish() == 0, job.said()
    assert "before the end of the training; the same command continues from step 30" in job.said().splitlines()[-1]


def page_of(agent: int) -> Page:
    """Of its first rank."""
    board = next(fd for fd in Path(f"/proc/{agent}/fd").iterdir() if "mt-resilient-board" in os.readlink(fd))
    with board.open("r+b") as file:
        return Page(memoryview(mmap.mmap(file.fileno(), PAGE_BYTES)))


@pytest.mark.variant
def test_a_disk_that_was_always_full_does_not_make_a_training_begin_again(tmp_path: Path, small_disk: Path) -> None:
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "40"]
    job = Job(tmp_path, command, "--durable-every", "1000", "--snapshots", str(small_disk))
    job.until_step(29)
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk / 'ballast'}", "bs=4k"], capture_output=True, check=False)
    assert job.finish() == 3, job.said()
    assert "the training is over, but no snapshot is on disk (step 40:" in job.said().splitlines()[-1]
    (small_disk / "ballast").unlink()
    job.start()
    assert job.finish() == 2
    assert "is finished; name another directory" in job.said()


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that `fsfreeze` can stop: whoever writes then hangs in the kernel."""
    image, place = tmp_path / "image", tmp_path / "freezer"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=False)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["fsfreeze", "-u", place], capture_output=True, check=False)
    subprocess.run(["umount", "--lazy", place], check=True)


def test_storage_that_hangs_holds_up_nobody(tmp_path: Path, freezer: Path) -> None:
    expected, _ = undisturbed(MINIMAL, "--steps", "60")
    command = ["--nproc-per-node", "2", str(GATED), str(MINIMAL), "--steps", "60", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "5", "--snapshots", str(freezer))
    job.until_said("is on disk")
    subprocess.run(["fsfreeze", "-f", freezer], check=True)
    job.until_step(25)
    job.kill_rank(0)
    job.until_said("recovered (rung 2")
    assert "from memory" in job.said()
    subprocess.run(["fsfreeze", "-u", freezer], check=True)
    assert job.finish() == 0, job.said()
    assert digest_of(job.printed()) == expected
    assert "step 60 is on disk" in job.said()


@pytest.mark.variant
def test_a_journal_whose_disk_hangs_holds_up_nobody_and_has_all_lines_in_the_end(freezer: Path) -> None:
    journal = Notebook(freezer / "journal.jsonl")
    subprocess.run(["fsfreeze", "-f", freezer], check=True)
    began_s = time.monotonic()
    for number in range(100):
        journal.write("said", float(number), sentence="all is well")
    assert time.monotonic() - began_s < 1
    journal.finish()
    assert time.monotonic() - began_s < 2 * LAST_S
    subprocess.run(["fsfreeze", "-u", freezer], check=True)
    journal._thread.join()
    assert [line["at_s"] for line in journal.read()] == list(range(100))


@pytest.mark.variant
def test_what_is_on_disk_of_a_course_that_is_left_is_set_aside_when_storage_answers_again(
    tmp_path: Path, freezer: Path
) -> None:
    """It hangs, and the agent does not."""
    command = ["--nproc-per-node", "2", str(MINIMAL), "--steps", "400", "--step-delay", "0.02"]
    job = Job(tmp_path, command, "--durable-every", "1000", "--snapshots", str(freezer))
    job.until(lambda now: len(now.memory_steps) > 1)

    def order(*words: str) -> str:
        return cli(*words, "--run-dir", str(job.directory)).stdout

    assert "is on disk" in order("snapshot", "now")
    assert "all ranks wait" in order("pause")
    assert "is on disk" in order("snapshot", "now")
    to, reached = job.until(lambda now: now.paused and len(now.durable_steps) == 2).durable_steps
    subprocess.run(["fsfreeze", "-f", freezer], check=True)
    assert f"all ranks have restored step {to}" in order("rewind", "--to", str(to), "--skip", "1")
    assert f"step {reached}" in job.said()
    assert "storage does not answer" in job.said()
    assert "the ranks continue" in order("resume")
    subprocess.run(["fsfreeze", "-u", freezer], check=True)
    assert job.finish() == 0, job.said()
    (left,) = [each for each in (freezer / "snapshots").glob(f"{reached:010d}-*") if (each / "LEFT-1").exists()]
    assert "does not belong to the lineage any more" in (left / "LEFT-1").read_text()
