"""The manifests of examples/kubernetes fit Kubernetes' schemas, and their custom resources a list of fields. examples/slurm is sound bash.
`run` understands the command in each."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mt_resilient import cli

from ..harness import ROOT

KUBERNETES = ROOT / "examples" / "kubernetes"
SBATCH = ROOT / "examples" / "slurm" / "train.sbatch"
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
STRING, WHOLE, TRUTH, ANY = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "object"}


def closed(required: str = "", **fields: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema of an object that has no other fields."""
    return {"type": "object", "properties": fields, "required": required.split(), "additionalProperties": False}


_RUN_POLICY = closed(
    activeDeadlineSeconds=WHOLE,
    backoffLimit=WHOLE,
    cleanPodPolicy={"enum": ["All", "Running", "None"]},
    managedBy=STRING,
    schedulingPolicy=ANY,
    suspend=TRUTH,
    ttlSecondsAfterFinished=WHOLE,
)
_REPLICAS = closed(
    "template", replicas=WHOLE, restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, template=ANY
)
PYTORCHJOB = closed(
    "pytorchReplicaSpecs",
    elasticPolicy=ANY,
    nprocPerNode=STRING,
    runPolicy=_RUN_POLICY,
    pytorchReplicaSpecs=closed("Master", Master=_REPLICAS, Worker=_REPLICAS),
)
_REPLICATED = closed("name template", name=STRING, groupName=STRING, dependsOn=ANY, replicas=WHOLE, template=ANY)
JOBSET = closed(
    "replicatedJobs",
    coordinator=ANY,
    failurePolicy=closed(maxRestarts=WHOLE, restartStrategy=STRING, rules={"type": "array"}),
    managedBy=STRING,
    network=ANY,
    replicatedJobs={"type": "array", "items": _REPLICATED},
    startupPolicy=ANY,
    successPolicy=ANY,
    suspend=TRUTH,
    ttlSecondsAfterFinished=WHOLE,
    volumeClaimPolicies={"type": "array"},
)
"""Of the two custom resources, the fields that they have around a Job or a pod; written by hand."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


def native(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects of Kubernetes' own kinds in a document: itself, or what a custom resource holds. Raises ValidationError."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install '.[test]'")
    if found["kind"] == "PyTorchJob":
        jsonschema.validate(found["spec"], PYTORCHJOB)
        for role, replicas in found["spec"]["pytorchReplicaSpecs"].items():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}, **replicas["template"]}
            assert [each["name"] for each in pod["spec"]["containers"]] == ["pytorch"], (
                "the operator asks for this name"
            )
            yield pod
    elif found["kind"] == "JobSet":
        jsonschema.validate(found["spec"], JOBSET)
        for job in found["spec"]["replicatedJobs"]:
            yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}
    else:
        yield found


@pytest.mark.parametrize("name", sorted(path.name for path in KUBERNETES.iterdir()))
def test_a_manifest_fits_the_schemas_strictly(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install '.[test]'")
    for found in documents(name):
        for each in native(found):
            validator.validate(each, "1.30", strict=True)


@pytest.mark.parametrize(
    ("name", "host", "environ", "expected"),
    [
        (
            "indexed-job.yaml",
            "gpt-3",
            {"JOB_COMPLETION_INDEX": "3"},
            {"nodes": "8", "this node": "gpt-3", "job": "gpt"},
        ),
        ("jobset.yaml", "gpt-node-0-3", {"JOB_COMPLETION_INDEX": "3"}, {"nodes": "8", "this node": "gpt-node-0-3"}),
        (
            "pytorchjob.yaml",
            "gpt-worker-2",
            {"PET_NNODES": "8", "WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "gpt-master-0", "MASTER_PORT": "23456"},
            {"nodes": "8", "this node": "gpt-worker-2", "job": "gpt"},
        ),
    ],
)
def test_the_command_of_a_manifest_is_understood_in_its_pod(
    name: str,
    host: str,
    environ: dict[str, str],
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    for variable, value in (POD | environ).items():
        monkeypatch.setenv(variable, value)
    (found,) = documents(name)
    containers = [*_commands(found)]
    assert containers
    for words in containers:
        assert words[:2] == ["mt-resilient", "run"]
        said = understood(words[2:], tmp_path, monkeypatch, capsys)
        assert expected.items() <= said.items()


@pytest.mark.parametrize("name", ["indexed-job.yaml", "jobset.yaml"])
def test_a_job_fails_after_codes_that_a_new_pod_would_end_with_too(name: str) -> None:
    (job,) = (each for found in documents(name) for each in native(found))
    first = job["spec"]["podFailurePolicy"]["rules"][0]
    assert first == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2, 5, 6, 7, 93]}}
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # the policy needs it


def _commands(thing: Any) -> Iterator[list[str]]:
    """All commands of containers, however deep."""
    if isinstance(thing, dict):
        if "command" in thing:
            yield thing["command"]
        thing = list(thing.values())
    for each in thing if isinstance(thing, list) else ():
        yield from _commands(each)


def understood(
    words: list[str], place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """What `run --dry-run` prints, by name."""
    (place / "pretrain_gpt.py").write_text("from megatron.training import pretrain\n")
    monkeypatch.chdir(place)
    assert cli.main(["run", "--dry-run", *words]) == 0
    return {k: v.strip() for k, v in (line.split(":", 1) for line in capsys.readouterr().out.splitlines())}


def test_the_sbatch_script_is_sound_and_its_command_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nwhile case $1 in -*) ;; *) false;; esac; do shift; done; printf "%s\\0" "$@"\n')
    srun.chmod(0o755)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "gpt", "SLURM_STEP_NUM_NODES": "9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-17")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(["bash", str(SBATCH)], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    assert words[:2] == ["mt-resilient", "run"]
    said = understood(words[2:], tmp_path, monkeypatch, capsys)
    assert (said["nodes"], said["this node"], said["job"]) == ("8", "gpu-17", "gpt")


def test_no_script_of_the_examples_has_a_fault_that_shellcheck_knows() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("pip install '.[test]'")
    scripts = [SBATCH, *sorted((ROOT / "examples").rglob("*.sh"))]
    command = ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", "--severity=warning", *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed (Debian: systemd)"
)
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "systemd" / "training.service").read_text()
    assert "/srv/train/venv/bin/mt-resilient" in text
    unit = tmp_path / "training.service"
    unit.write_text(
        text.replace("/srv/train/venv/bin/mt-resilient", str(Path(sys.executable).with_name("mt-resilient")))
    )
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if unit.name in line]  # it tells of this machine's own units, too
    assert (done.returncode, told) == (0, [])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_the_scrape() -> None:
    command = ["promtool", "check", "config", str(ROOT / "examples" / "prometheus" / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
