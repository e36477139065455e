"""Scripts with torchrun inside, wrapped as they are: each torchrun has an agent, and all else is as without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from mt_resilient.agent.launch.handover import BIN as SHIMS
from mt_resilient.agent.launch.handover import SITE
from mt_resilient.agent.launch.ports import free_port
from mt_resilient.agent.run_directory import InUse, RunDirectory
from mt_resilient.resilience.report.journal import Journal

from ..etcd_cluster import eventually
from ..harness import BIN, MINIMAL, digest_of, environment, undisturbed
from ..sshd import PROGRAM, Sshd

STAGE = """
import json, os, sys
told = {name: os.environ.get(name) for name in ("PATH", "PYTHONPATH", "MINE", "LOCAL_RANK", "MT_RESILIENT_WRAPS")}
with open(os.environ["TOLD"], "a") as file:
    file.write(json.dumps([sys.argv[1:], os.getcwd(), told]) + "\\n")
print("stage", *sys.argv[1:], flush=True)
"""
SCRIPT = """
trap 'echo trapped' EXIT
export PYTHONPATH={here}:$PYTHONPATH MINE="a b"
python -c 'import os; print("data prepared", os.getppid() > 0)'
torchrun --nproc-per-node 1 {stage} one "x y" 2>/dev/null | tee {here}/log
echo "codes ${{PIPESTATUS[@]}}"
mkdir -p {here}/elsewhere
(cd {here}/elsewhere
 nohup {torchrun} --log-dir {here}/torchrun-$(date +%s%N) {stage} two > {here}/two 2>/dev/null &
 wait $!; echo "code $?")
python -u -m torch.distributed.run --nproc_per_node=1 {stage} three 2>/dev/null
exit 7
"""


def script(place: Path) -> Path:
    place.mkdir()
    (place / "stage.py").write_text(STAGE)
    (path := place / "run.sh").write_text(
        SCRIPT.format(here=place, stage=place / "stage.py", torchrun=BIN / "torchrun")
    )
    return path


def told(place: Path) -> list[object]:
    text = (place / "told").read_text().replace(f"{SITE}:", "").replace(str(place), "HERE")
    return [json.loads(line) for line in text.splitlines()]


def test_a_script_with_several_torchruns_runs_as_it_is(tmp_path: Path) -> None:
    """By name into a pipe, by path in the background in another directory, and as a module."""
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    done = {}
    for place in (plain, ours):
        wrap = [] if place is plain else [BIN / "mt-resilient", "run", "--no-warm", "--metrics-port", "0", "--"]
        command = [*wrap, "bash", str(script(place))]
        environ = environment(TOLD=str(place / "told"))
        done[place] = subprocess.run(command, cwd=place, env=environ, capture_output=True, text=True, timeout=240)
    assert (done[ours].returncode, done[ours].stdout) == (done[plain].returncode, done[plain].stdout), done[ours].stderr
    assert "bash is not torchrun. It runs unchanged" in done[ours].stderr
    assert (ours / "two").read_text() == (plain / "two").read_text()
    assert told(ours) == told(plain)
    runs = [ours / "mt-runs" / name for name in ("stage", "stage.2", "stage.3")]
    starts = [next(line for line in Journal(run / "journal.jsonl").read() if line["kind"] == "start") for run in runs]
    assert [start["arguments"][1] for start in starts] == ["one", "two", "three"]
    (invocation,) = {start["invocation"] for start in starts}
    assert invocation
    assert all((run / "finished").exists() for run in runs)


OUTER = """
TIME=$(date +%Y%m%d_%H%M%S.%N)
for host in $(grep -v '^#' {here}/hostfile); do
  cmd="bash -c 'cd {here}; bash inner.sh $TIME $host > log.$host 2>&1 &'"
  ssh {options} -f -n $host $cmd
done
"""
INNER = """
export PATH={bin}:$PATH PYTHONPATH={path}:$PYTHONPATH TOLD={here}/told
ARGUMENTS=(--nproc_per_node 1 --nnodes $(grep -c -v '^#' hostfile) --master_addr 127.0.0.1 --master_port {port}
  --node_rank $(awk '!/^#/ {{ranks[$1]=n++}} END {{print ranks["'$2'"]}}' hostfile))
torchrun ${{ARGUMENTS[@]}} --rdzv_id $1 --log_dir {here}/output_log/$1 --redirects 3 {here}/stage.py one
echo "ended with $?"
"""


@pytest.mark.skipif(PROGRAM is None, reason="needs sshd")
def test_torchruns_that_a_script_starts_by_ssh_are_one_job(tmp_path: Path) -> None:
    """An outer script of the shape that Moore Threads' have. It ends at once, and the job goes on, as without us."""
    sshd = Sshd(tmp_path)
    options = " ".join(f"-o {option}" for option in sshd.options)
    names = {"here": tmp_path, "options": options, "bin": BIN, "path": os.environ.get("PYTHONPATH", "")}
    names["port"] = free_port("127.0.0.1", wished=11_000)  # below those that the agents draw, until it is bound
    logs = [tmp_path / f"log.{host}" for host in ("one", "two")]
    (tmp_path / "hostfile").write_text("# the hosts\none\ntwo\n")
    (tmp_path / "stage.py").write_text(STAGE)
    for name, text in (("outer.sh", OUTER), ("inner.sh", INNER)):
        (tmp_path / name).write_text(text.format(**names))
    try:
        wrap = [BIN / "mt-resilient", "run", "--no-warm", "--metrics-port", "0", "--", "bash", "outer.sh"]
        done = subprocess.run(wrap, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        ends = time.monotonic() + 240
        while not all("ended with" in (log.read_text() if log.exists() else "") for log in logs):
            assert time.monotonic() < ends, "".join(log.read_text() for log in logs)
            time.sleep(0.2)
    finally:
        sshd.stop()
    said = [log.read_text() for log in logs]
    assert all("ended with 0" in each for each in said), said
    assert "runs the etcd of all nodes" in said[0]
    lines = (tmp_path / "told").read_text().splitlines()
    assert len(lines) == 2
    assert SHIMS not in lines[0]
    runs = sorted((tmp_path / "mt-runs" / "stage" / "nodes").iterdir())
    assert [run.name[:2] for run in runs] == ["0-", "1-"]


RUNNER = r"""
import datetime, os, shlex, subprocess, sys
here = os.path.dirname(os.path.abspath(__file__))
script, output, pid = (os.path.join(here, "logs", f"host_0_localhost{end}") for end in ("_run.sh", ".output", ".pid"))
os.makedirs(os.path.join(here, "logs"), exist_ok=True)
if sys.argv[1] == "stop":
    sys.exit(subprocess.run(f"pkill -P $(cat {pid})", shell=True).returncode)
now = datetime.datetime.now().strftime("%Y%m%d_%H%M%S.%f")
options = {"rdzv_id": now, "nnodes": 1, "node_rank": 0, "nproc_per_node": 2, "rdzv_backend": "c10d"}
options |= {"rdzv_endpoint": f"localhost:{sys.argv[2]}", "log_dir": f"{here}/logs/details/host_0_localhost/{now}"}
options |= {"redirects": 3, "tee": 3}
words = ["OMP_NUM_THREADS=1", "torchrun"]
words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
with open(script, "w") as file:
    file.write(f'cd {here}\nexport PYTHONPATH={here}:${{PYTHONPATH}}\ncmd="{shlex.join([*words, *sys.argv[3:]])}"\n')
    file.write(f'nohup bash -c "$cmd; sync" >> {output} 2>&1 & echo $! > {pid}\n')
subprocess.run(f"bash {script}", shell=True, check=True, capture_output=True)
"""


def test_a_runner_of_flagscale_s_shape_is_stopped_and_started_again(tmp_path: Path) -> None:
    """A Python program that writes a script with a time stamp in torchrun's options, and starts it in the background. Its own way to stop
    the job ends the agent in order, and the same command again continues the job."""
    expected, _ = undisturbed(MINIMAL, "--steps", "120")
    (tmp_path / "runner.py").write_text(RUNNER)
    start = ["python", "runner.py", "run", str(free_port("127.0.0.1", wished=11_000))]
    wrapped = [BIN / "mt-resilient", "run", "--no-warm", "--metrics-port", "0", "--", *start]
    wrapped += [MINIMAL, "--steps", "120", "--step-delay", "0.1"]
    output = tmp_path / "logs" / "host_0_localhost.output"

    def call(*words: str | Path) -> None:
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def wait_for(text: str) -> str:
        ends = time.monotonic() + 120
        while text not in (said := output.read_text() if output.exists() else ""):
            assert time.monotonic() < ends, said[-4000:]
            time.sleep(0.1)
        return said

    call(*wrapped)
    wait_for("step 20 ")
    call("python", "runner.py", "stop")
    wait_for("the same command continues from step ")
    eventually(lambda: let_go(tmp_path / "mt-runs" / "train"))
    left = re.search(r"the same command continues from step (\d+)", output.read_text())
    assert left
    call(*wrapped)
    said = wait_for("the training is over")
    assert f"generation 2: 2 ranks start from step {left[1]}" in said
    assert digest_of(said) == expected
    assert [run.name for run in (tmp_path / "mt-runs").iterdir()] == ["train"]


def let_go(place: Path) -> bool:
    """Whether the agent that ran in this directory has ended: another one of the same minute would take a directory of its own."""
    run = RunDirectory(place)
    try:
        run.take()
    except InUse:
        return False
    run.release()
    return True
