"""A real Megatron job on three nodes loses one, and trains on in the layout that SimuMax has chosen for two."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mt_resilient.agent.etcd.binary import find_server
from mt_resilient.agent.etcd.server import EmbeddedEtcd
from mt_resilient.checkpoint.backend import place
from mt_resilient.checkpoint.durable import catalog, commit

from ..harness import Job
from .loops import MEGATRON_DP2, Record, behind, read_record, undisturbed

SIMUMAX = Path(os.environ.get("SIMUMAX", "/nowhere"))
PP3 = ("--num-layers", "6", "--pipeline-model-parallel-size", "3", "--hidden-dropout", "0", "--attention-dropout", "0")
"""Without dropout: its generators have no place in another layout."""
MODEL = {"hidden_size": 32, "head_num": 4, "kv_head_num": 4, "head_size": 8, "intermediate_size": 128, "layer_num": 6}
ON_A_NODE = replace(MEGATRON_DP2, ranks=1)


def losses(record: Record, rank: int) -> dict[int, float]:
    rows = record.losses[rank]
    return {at: struct.unpack("<f", bytes.fromhex(loss))[0] for at, (loss, _) in rows.items() if loss != "-"}


@pytest.mark.variant
@pytest.mark.megatron
@pytest.mark.slow
@pytest.mark.skipif(not SIMUMAX.exists(), reason="SIMUMAX names no checkout of SimuMax")
def test_two_nodes_of_three_go_on_in_the_layout_that_simumax_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason := MEGATRON_DP2.missing():
        pytest.skip(reason)
    expected, _ = undisturbed(replace(MEGATRON_DP2, ranks=3), *PP3)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(SIMUMAX)])))
    subprocess.run([sys.executable, "-c", "import simumax.core.perf_llm"], check=True)  # later imports are quicker
    model, shared = tmp_path / "model.json", tmp_path / "shared"
    model.write_text(json.dumps(MODEL | {"vocab_size": 4096, "use_swiglu": False}))
    server = EmbeddedEtcd(find_server(), tmp_path / "etcd", tmp_path / "etcd.log")
    options = ["--etcd", server.start(), "--job", "shrinks", "--nodes", "2:3", "--snapshots", str(shared)]
    options += ["--durable-every", "3", "--set", "nodes.join_s=600", "--set", "agent.lease_ttl_s=5"]
    options += ["--set", f"nodes.simumax_model={model}"]
    options += ["--set", f"nodes.simumax_system={SIMUMAX / 'configs' / 'system' / 'a100_pcie.json'}"]

    def agent(name: str) -> Job:
        words = ("--node", name, *options)
        return behind(ON_A_NODE, tmp_path / name, *words, arguments=PP3, nemesis="hang@8:0")

    jobs: list[Job] = []
    try:
        jobs.append(agent("n1"))
        jobs[0].until_said("On 2 nodes the job trains in another: --pipeline-model-parallel-size", 60)
        jobs += [agent("n2"), agent("n3")]  # they find SimuMax's answer in etcd
        jobs[0].until_said("step 6 is on disk")
        jobs[2].kill_everything()
        assert [job.finish(280) for job in jobs[:2]] == [0, 0], jobs[0].said()[-4000:]
    finally:
        for job in jobs:
            job.agent.kill()
        server.stop()
    worlds = [commit.read_commit(snapshot).world for snapshot in catalog.committed(place.at(str(shared)))]
    assert (worlds[0], max(worlds)) == (2, 3)
    before, after = losses(expected, 2), losses(read_record(tmp_path / "n2"), 1)
    assert sorted(after) == list(range(7, 13)), "the last stage is on the second of two nodes"
    assert after == pytest.approx({at: before[at] for at in after}, rel=1e-5)
