"""A snapshot leaves for zarr, safetensors and torch's DCP, and DCP comes in: every bit, or one sentence that says why not."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from safetensors import safe_open
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from mt_resilient import SnapshotStore
from mt_resilient.checkpoint.backend.filesystem import Files
from mt_resilient.checkpoint.durable import catalog, commit
from mt_resilient.checkpoint.durable.load_resharded import Saved
from mt_resilient.checkpoint.durable.retention import RetentionPolicy
from mt_resilient.checkpoint.durable.snapshot_view import Contents
from mt_resilient.checkpoint.format.pytree import Tagged
from mt_resilient.checkpoint.format.sharding import Part
from mt_resilient.cli import main
from mt_resilient.formats import dcp_names, import_checkpoint, safetensors_files
from mt_resilient.formats.dcp_reader import open_dcp
from mt_resilient.formats.export import export
from mt_resilient.resilience.errors import MachineError, SnapshotError, UsageError

from ..played import Node
from .test_reshard import save, whole

Capture = pytest.CaptureFixture[str]
BF16 = torch.randn(6, 5).bfloat16()
BIG = torch.arange(3000 * 4096, dtype=torch.float32).view(3000, 4096)
"""49 MB: two chunks of zarr, twelve of a slab."""
FP8 = {
    name: torch.tensor([1.0, 2.0]).to(getattr(torch, name))
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of two ranks: shards by columns, a flat shard, names that zarr would stumble over, and what each rank has for itself."""
    place = tmp_path_factory.mktemp("formats")
    left = Part(name="model/bf16", shape=(6, 5), offset=(0, 0), box=(6, 2))
    right = Part(name="model/bf16", shape=(6, 5), offset=(0, 2), box=(6, 3))
    flat = [Part(name="model/flat", shape=(3, 3), offset=(0, 0), box=(3, 3), flat=run) for run in ((0, 4), (4, 9))]
    numbers = torch.arange(9)
    first = [
        ("model/big", BIG, whole("model/big", BIG)),
        ("model/bf16", BF16[:, :2].contiguous(), [left]),
        ("model/flat", numbers[:4], [flat[0]]),
        ("model/empty", torch.zeros(0, 3), whole("model/empty", torch.zeros(0, 3))),
        ("model/a//__b", numbers, whole("model/a//__b", numbers)),
        ("model/x", torch.tensor(7), whole("model/x", torch.tensor(7))),
        ("model/x/y", torch.tensor([True]), whole("model/x/y", torch.tensor([True]))),
        *((f"model/{name}", tensor, whole(f"model/{name}", tensor)) for name, tensor in FP8.items()),
        ("randomness", torch.arange(3), []),
    ]
    second = [
        ("bf16", BF16[:, 2:].contiguous(), [right]),
        ("flat", numbers[4:], [flat[1]]),
        ("randomness", torch.arange(4), []),
    ]
    save(place, [first, second])
    return place


def test_a_value_that_is_not_a_number_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    node = Node(Files(tmp_path))
    node.snapshot(1, values={"best": {"loss": float("nan"), "at": (1, np.float32("nan"))}})
    contents = Contents(Saved(node.drain_here(1)))
    node.close()
    assert contents.values.keys() == {"step", "seed", "best"}, "said once, and not by rank"
    assert contents.tensors.keys() == {"rank-00000/x", "rank-00001/x"}


def test_what_json_cannot_say_is_text_for_other_formats(tmp_path: Path) -> None:
    node = Node(Files(tmp_path))
    held = Tagged(("", {"seen": Tagged(("set", (1, None)))}))
    node.snapshot(1, values={"best": {1 << 20_000: 1 << 30_000}, "held": held})
    Saved(node.drain_here(1))
    node.close()
    with SnapshotStore(str(tmp_path)) as store:
        values = zarr.open_group(store, mode="r").attrs["values"]
    assert values["best"] == {hex(1 << 20_000): hex(1 << 30_000)}
    assert values["held"] == {"seen": {"set": [1, None]}}


# zarr


def test_zarr_lists_and_reads_every_tensor(root: Path) -> None:
    group = zarr.open_group(SnapshotStore(str(root)), mode="r")
    found = dict(group.members(max_depth=None))
    arrays = {array.attrs["name"]: array for array in found.values() if isinstance(array, zarr.Array)}
    assert arrays.keys() == Contents(Saved(catalog.find(str(root)))).tensors.keys()
    assert group["model/bf16"].dtype == ml_dtypes.bfloat16
    assert group["model/bf16"][1:4, 1:3].tobytes() == BF16[1:4, 1:3].contiguous().view(torch.int16).numpy().tobytes()
    assert np.array_equal(group["model/big"][2040:2060, 7], BIG[2040:2060, 7].numpy())
    assert np.array_equal(group["model/big"][:], BIG.numpy())
    assert group["model/flat"][:].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert group["model/empty"].shape == (0, 3)
    assert group["model/a/%/%5F_b"][3] == 3
    assert (group["model/x%"][()], group["model/x/y"][0]) == (7, True)
    assert [group[f"rank-0000{rank}/randomness"].shape for rank in range(2)] == [(3,), (4,)]
    for name, tensor in FP8.items():
        assert group[f"model/{name}"].dtype == getattr(ml_dtypes, name)
        assert group[f"model/{name}"][:].tobytes() == tensor.view(torch.uint8).numpy().tobytes()


OPEN_ELSEWHERE = """
import pickle, sys
store = pickle.loads(bytes.fromhex(sys.argv[1]))
print("open", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["here", "pickled", "forked"])
def test_what_a_zarr_store_has_open_is_not_retired(how: str, tmp_path: Path) -> None:
    node = Node(Files(tmp_path))
    node.snapshot(1)
    snapshot = node.drain_here(1)
    node.close()
    store = SnapshotStore(str(tmp_path))
    assert not commit.delete(snapshot)
    if how == "pickled":
        command = [sys.executable, "-c", OPEN_ELSEWHERE, pickle.dumps(store).hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"open\n"
            store.close()
            assert not commit.delete(snapshot)
    if how == "forked":
        ends, end = os.pipe()
        child = os.fork()
        if not child:
            os.close(end)
            os.read(ends, 1)
            os._exit(0)
        store.close()
        assert not commit.delete(snapshot)
        for descriptor in (end, ends):
            os.close(descriptor)
        os.waitpid(child, 0)
    del store
    assert commit.delete(snapshot)


def test_a_zarr_store_whose_snapshot_is_gone_says_so(tmp_path: Path) -> None:
    node = Node(Files(tmp_path))
    node.snapshot(1)
    snapshot = node.drain_here(1)
    node.close()
    array = zarr.open_group(store := SnapshotStore(str(tmp_path)), mode="r")["rank-00001/x"]
    store.close()
    assert commit.delete(snapshot)
    with pytest.raises(MachineError, match="it was deleted while it was being read"):
        array[:]


def test_zarr_gives_foreign_dtypes_as_integers_where_it_is_asked_to(root: Path) -> None:
    group = zarr.open_group(SnapshotStore(str(root), as_integers=True), mode="r")
    assert (group["model/bf16"].dtype, group["model/bf16"].attrs["dtype"]) == (np.uint16, "bfloat16")
    assert group["model/bf16"][:].tobytes() == BF16.view(torch.int16).numpy().tobytes()


def test_without_ml_dtypes_it_says_so_and_gives_integers(root: Path) -> None:
    program = f"""
import sys, tensorstore
sys.modules["ml_dtypes"] = None
import zarr
from mt_resilient import SnapshotStore
group = zarr.open_group(SnapshotStore({str(root)!r}), mode="r")
print(len(list(group["model"].arrays())), group["model/bf16"].dtype)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[1:] == ["uint16"], done.stderr
    assert (
        "ml_dtypes is not installed: bfloat16, float8_e4m3fn, float8_e5m2, float8_e8m0fnu are returned as integers"
        in done.stderr
    )


def test_without_zarr_the_error_names_the_extra() -> None:
    program = "import sys; sys.modules['zarr.abc.store'] = None; from mt_resilient import SnapshotStore"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "ImportError: zarr-python 3.1 or newer is needed" in done.stderr
    assert "pip install 'mt-resilient[zarr]'" in done.stderr.splitlines()[-1]


def test_zarr_s_store_is_read_only_and_travels(root: Path) -> None:
    store = SnapshotStore(str(root))
    assert pickle.loads(pickle.dumps(store)) == store
    assert store == SnapshotStore(str(next((root / "snapshots").iterdir())))
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(store, mode="r")["model/flat"][0] = 1
    with pytest.raises(UsageError, match="no committed snapshot at"):
        SnapshotStore(str(root / "nowhere"))


def test_a_store_that_has_travelled_is_of_the_same_snapshot(tmp_path: Path) -> None:
    older = save(tmp_path, [[("t", torch.zeros(3), whole("t", torch.zeros(3)))]])
    store = pickle.dumps(here := SnapshotStore(str(tmp_path)))
    shutil.copytree(older.path, older.path.with_name(older.name.replace("1-g1-", "2-g1-", 1)))
    assert catalog.find(str(tmp_path)) != older
    assert pickle.loads(store) == here


def test_a_damaged_chunk_is_no_number_of_zarr_s(tmp_path: Path) -> None:
    values = torch.arange(1000.0)
    snapshot = save(tmp_path, [[("t", values, whole("t", values))]])
    group = zarr.open_group(SnapshotStore(str(tmp_path)), mode="r")
    flip(snapshot)
    with pytest.raises(SnapshotError, match="chunk 0 is damaged"):
        group["t"][:]


def flip(snapshot: Files) -> None:
    shard = next(snapshot.path.glob("rank-00000/c/0/0"))
    content = bytearray(shard.read_bytes())
    content[77] ^= 1
    shard.write_bytes(content)


# Export


def same_as(saved: Saved, name: str, tensor: torch.Tensor) -> bool:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() == saved.whole(name).tobytes()


def test_what_is_being_exported_is_not_retired(tmp_path: Path) -> None:
    older = save(tmp_path, [[("t", torch.zeros(3), whole("t", torch.zeros(3)))]])
    shutil.copytree(older.path, older.path.with_name(older.name.replace("1-g1-", "2-g1-", 1)))
    gone: list[list[Any]] = []

    def slow(contents: Any, tensors: Any, values: Any, target: Path) -> None:
        gone.append(catalog.retire(Files(tmp_path), RetentionPolicy(keep=1), 0.0))
        safetensors_files.write(contents, tensors, values, target)

    assert "1 tensors" in export(older, slow, tmp_path / "out")
    assert gone == [[]]
    assert len(catalog.retire(Files(tmp_path), RetentionPolicy(keep=1), 0.0)) == 1


def test_safetensors_in_several_files(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Saved(catalog.find(str(root)))

    def small(contents: Any, tensors: Any, values: Any, target: Path) -> None:
        safetensors_files.write(contents, tensors, values, target, file_bytes=1000)

    told = export(saved.snapshot, small, tmp_path / "out")
    assert "12 tensors (49.2 MB, 2 of them belong to one rank or have no position in a global tensor)" in told
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) == len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    for name in (name for name, boxes in saved.boxes.items() if boxes and "e8m0" not in name):
        with safe_open(tmp_path / "out" / index["weight_map"][name], "pt") as file:
            assert same_as(saved, name, file.get_tensor(name))
    assert json.loads((tmp_path / "out" / "state.json").read_text())["mt_resilient"]["step"] == 1


def test_dcp_is_read_by_torch_in_a_plain_process(root: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "dcp"
    assert main(["snapshots", "export", str(root), "--to", "dcp", str(out)]) == 0
    assert "12 tensors" in capsys.readouterr().out
    program = f"""
import torch
from torch.distributed import checkpoint as dcp
state = {{"model": {{"bf16": torch.zeros(6, 5).bfloat16(), "flat": torch.zeros(3, 3).long()}}, "mt_resilient": {{"step": 0}}}}
dcp.load(state, checkpoint_id={str(out)!r})
print(state["model"]["flat"].tolist(), state["mt_resilient"], state["model"]["bf16"].view(torch.int16).tolist())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (
        done.stdout.strip() == f"[[0, 1, 2], [3, 4, 5], [6, 7, 8]] {{'step': 1}} {BF16.view(torch.int16).tolist()}"
    ), done.stderr
    big = {"model": {"big": torch.zeros(3000, 4096), **{name: torch.zeros_like(t) for name, t in FP8.items()}}}
    dcp.load(big, checkpoint_id=out)
    assert torch.equal(big["model"]["big"], BIG)
    assert all(torch.equal(big["model"][name].view(torch.uint8), t.view(torch.uint8)) for name, t in FP8.items())


def small_run(place: Path) -> Files:
    values = torch.arange(6.0).view(2, 3)
    return save(
        place, [[("model/t", values, whole("model/t", values)), ("z", torch.ones(1, dtype=torch.complex128), [])]]
    )


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_what_keeps_an_export_from_being_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, capsys: Capture, format: str
) -> None:
    snapshot = small_run(tmp_path / "run")

    def fails(code: int, what: str, *words: str, target: str = "out") -> None:
        before = sorted(tmp_path.iterdir())
        assert main(["snapshots", "export", *words, "--to", format, str(tmp_path / target)]) == code
        said = capsys.readouterr().err
        assert said.startswith("mt-resilient: ")
        assert said.count("\n") == 1
        assert what in said
        assert sorted(tmp_path.iterdir()) == before

    run = str(tmp_path / "run")
    fails(2, "no committed snapshot at", str(tmp_path / "nothing"))
    fails(2, "there is no run under", "17")
    fails(2, "there is no modle in", run, "--only", "modle")
    fails(2, "run is there already; nothing was written over it", run, target="run")
    if format == "safetensors":
        fails(2, "safetensors has no complex128, the dtype of z", run)
    flip(snapshot)
    fails(6, "chunk 0 is damaged", run, "--only", "model")
    (snapshot.path / "rank-00000.json").unlink()
    fails(6, "rank-00000.json: No such file", run)
    (snapshot.path / "COMMIT").unlink()
    fails(2, "no committed snapshot at", str(snapshot))


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    (tmp_path / "out").mkdir()
    assert (
        main(
            [
                "snapshots",
                "export",
                str(tmp_path / "run"),
                "--to",
                "safetensors",
                str(tmp_path / "out"),
                "--only",
                "model",
            ]
        )
        == 0
    )
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["model.safetensors", "state.json"]


@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_full_disk_leaves_nothing_that_looks_whole(root: Path, tmp_path: Path, format: str) -> None:
    def bounded() -> None:  # no file may grow beyond 20 MB
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))

    words = [
        str(Path(sys.executable).parent / "mt-resilient"),
        "snapshots",
        "export",
        str(root),
        "--to",
        format,
        str(tmp_path / "out"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, preexec_fn=bounded)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("mt-resilient: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_has_left_goes_with_the_next(tmp_path: Path) -> None:
    small_run(tmp_path / "run")
    left = tmp_path / f".out.part-{socket.gethostname()}-4194305"  # no process has this number
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    assert main(["snapshots", "export", str(tmp_path / "run"), "--to", "dcp", str(tmp_path / "out")]) == 0
    assert not left.exists()


# Import


def test_what_left_comes_back(root: Path, tmp_path: Path) -> None:
    first = Saved(catalog.find(str(root)))
    for number, part_bytes in enumerate((import_checkpoint.PART_BYTES, 1000)):
        out, place = tmp_path / f"dcp{number}", tmp_path / f"in{number}"
        if not number:
            assert main(["snapshots", "export", str(root), "--to", "dcp", str(out)]) == 0
        found = dcp_names.from_torch(tmp_path / "dcp0")
        snapshot = import_checkpoint.import_into(Files(place), found, part_bytes=part_bytes)
        again = Saved(snapshot)
        assert catalog.verify(snapshot) == []
        assert len(again.manifests) == (3 if number else 1)
        assert {name for name in again.boxes if again.boxes[name]} == {
            name for name in first.boxes if first.boxes[name]
        }
        assert all(
            again.whole(name).tobytes() == first.whole(name).tobytes() for name, boxes in again.boxes.items() if boxes
        )
        assert found.step == 1


def test_a_checkpoint_of_torch_s_own_gets_our_names(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    weights, states = get_state_dict(model, optimizer)
    beside = {"seen": 8, "nested": {"count": torch.tensor([3])}}
    state = {
        "model": weights | {"_extra_state": b"fp8"},
        "optim": states,
        "scheduler": schedule.state_dict(),
        "counters": beside,
    }
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    assert (
        main(
            [
                "snapshots",
                "import",
                "--from",
                "dcp",
                str(tmp_path / "dcp"),
                "--snapshots",
                str(tmp_path / "in"),
                "--step",
                "5",
            ]
        )
        == 0
    )
    contents = Contents(Saved(catalog.find(str(tmp_path / "in"))))
    parameters = {name for name, _ in model.named_parameters()}
    expected = {f"optimizer/{kind}/model/{name}" for kind in ("exp_avg", "exp_avg_sq", "step") for name in parameters}
    assert contents.tensors.keys() == expected | {f"model/{name}" for name in parameters} | {"counters/nested/count"}
    assert same_as(contents.saved, "optimizer/exp_avg/model/1.weight", optimizer.state[model[1].weight]["exp_avg"])
    (group,) = contents.values["optimizer"]["param_groups"]
    assert (group["lr"], sorted(group["params"])) == (0.25, sorted(f"model/{name}" for name in parameters))
    assert contents.values["counters"] == {"seen": 8}
    assert contents.values["scheduler"]["last_epoch"] == 1
    assert contents.saved.snapshot.name.startswith("0000000005-")

    assert main(["snapshots", "export", str(tmp_path / "in"), "--to", "dcp", str(tmp_path / "out")]) == 0
    assert (
        main(["snapshots", "import", "--from", "dcp", str(tmp_path / "out"), "--snapshots", str(tmp_path / "again")])
        == 0
    )
    again = Contents(Saved(catalog.find(str(tmp_path / "again"))))
    assert (again.values, again.tensors.keys()) == (contents.values, contents.tensors.keys())
    assert again.saved.digest() == contents.saved.digest()


def test_what_keeps_an_import_from_being_is_one_sentence_and_leaves_nothing(tmp_path: Path, capsys: Capture) -> None:
    torch_s, place = tmp_path / "dcp", tmp_path / "in"
    dcp.save({"model": {"w": torch.arange(64.0)}}, checkpoint_id=torch_s)

    def fails(code: int, what: str, *words: str) -> None:
        assert main(["snapshots", "import", *words]) == code
        said = capsys.readouterr().err
        assert said.startswith("mt-resilient: ")
        assert said.count("\n") == 1
        assert what in said
        assert not list(tmp_path.glob("in/snapshots/*"))

    to = ("--snapshots", str(place))
    fails(2, "say where the snapshot goes", "--from", "dcp", str(torch_s))
    fails(2, "does not contain its step", "--from", "dcp", str(torch_s), *to)
    fails(2, "is not a torch.distributed.checkpoint directory", "--from", "dcp", str(tmp_path), *to)
    fails(2, "is not a torch.distributed.checkpoint directory", "--from", "dcp", str(tmp_path / "nowhere"), *to)
    fails(2, "is not a Megatron checkpoint in the format torch_dist", "--from", "megatron", str(tmp_path), *to)
    (torch_s / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    fails(2, "in Megatron's format 'zarr', and only torch_dist can be read", "--from", "megatron", str(torch_s), *to)
    (torch_s / "metadata.json").unlink()
    buckets = tmp_path / "iter_0000007"
    dcp.save({"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.ones(3)}, checkpoint_id=buckets)
    fails(2, "Save it again with --dist-ckpt-optim-fully-reshardable", "--from", "megatron", str(buckets), *to)
    flat = tmp_path / "iter_0000008"
    dcp.save(
        {"a.weight": torch.ones(4, 6), "optimizer.state.exp_avg.a.weight": torch.ones(2, 1, 12)}, checkpoint_id=flat
    )
    fails(2, "in flat shards (Megatron before 0.15), which cannot be imported", "--from", "megatron", str(flat), *to)
    fails(2, "invalid choice: 'zip'", "--from", "zip", str(torch_s), *to)
    data = next(torch_s.glob("*.distcp"))
    sound = data.read_bytes()
    data.write_bytes(sound[:-10])
    fails(6, "is missing or cut off", "--from", "dcp", str(torch_s), *to, "--step", "1")
    data.write_bytes(sound.replace(torch.arange(64.0).numpy().tobytes(), torch.ones(64).numpy().tobytes()))
    fails(6, "is damaged (Bad CRC-32", "--from", "dcp", str(torch_s), *to, "--step", "1")
    data.unlink()
    fails(6, "is missing or cut off", "--from", "dcp", str(torch_s), *to, "--step", "1")
    (torch_s / ".metadata").write_bytes(b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.")
    fails(
        6,
        "it names 'os.system', which does not belong in a checkpoint's metadata; nothing in it was run",
        "--from",
        "dcp",
        str(torch_s),
        *to,
    )
    data.write_bytes(sound)
    dcp.save({"model": {"w": torch.arange(64.0)}}, checkpoint_id=torch_s)
    assert main(["snapshots", "import", "--from", "dcp", str(torch_s), *to, "--step", "1"]) == 0
    before = sorted(os.listdir(place / "snapshots"))
    assert main(["snapshots", "import", "--from", "dcp", str(torch_s), *to, "--step", "2"]) == 2
    assert "already holds snapshots; nothing was imported" in capsys.readouterr().err
    assert sorted(os.listdir(place / "snapshots")) == before
    (place / "snapshots" / before[0] / "COMMIT").unlink()
    assert main(["snapshots", "import", "--from", "dcp", str(torch_s), *to, "--step", "2"]) == 2
    assert (
        "which still runs or was killed; nothing was imported. If no import runs, delete it" in capsys.readouterr().err
    )
    assert sorted(os.listdir(place / "snapshots")) == before


def test_chunks_that_do_not_make_up_their_tensor_are_refused(tmp_path: Path) -> None:
    def saved_with(change: Any) -> None:
        path = tmp_path / "dcp"
        dcp.save({"w": torch.arange(64.0).view(8, 8)}, checkpoint_id=path)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata.state_dict_metadata["w"])
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        open_dcp(path)

    def smaller(said: Any) -> None:
        said.chunks[0].sizes = torch.Size((4, 8))

    def twice(said: Any) -> None:
        said.size = torch.Size((16, 8))
        said.chunks.append(said.chunks[0])

    def huge(said: Any) -> None:
        said.size = said.chunks[0].sizes = torch.Size((1 << 30, 1 << 28))

    def outside(said: Any) -> None:
        said.chunks[0].offsets = torch.Size((0, 1))

    for change in (smaller, twice, huge, outside):
        with pytest.raises(SnapshotError):
            saved_with(change)
    saved_with(lambda said: None)
