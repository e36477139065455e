"""Stacks as faulthandler writes them → where a rank stands."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mt_resilient.agent.monitor import stack_sampler
from mt_resilient.resilience.detect.stack_traces import Frame, locate, parse
from mt_resilient.resilience.model.signals import Place

from ..etcd_cluster import eventually

LIB = "/env/lib/python3.11"
TORCH = f"{LIB}/site-packages/torch"
MEGATRON = "/src/Megatron-LM/megatron"
MAIN = ("/job/train.py", 31, "main")


def frames(*innermost_first: tuple[str, int, str]) -> tuple[Frame, ...]:
    return tuple(Frame(*frame) for frame in innermost_first)


@pytest.mark.parametrize(
    ("stack", "place", "words"),
    [
        ([MAIN], Place.ELSEWHERE, "at job/train.py line 31 in main"),
        (
            [
                (f"{TORCH}/distributed/distributed_c10d.py", 2, "all_reduce"),
                (f"{TORCH}/distributed/c10d_logger.py", 1, "wrapper"),
                MAIN,
            ],
            Place.COLLECTIVE,
            "in all_reduce, job/train.py line 31 in main",
        ),
        (
            [(f"{TORCH}/distributed/distributed_c10d.py", 2, "recv"), MAIN],
            Place.EXCHANGE,
            "in recv, job/train.py line 31 in main",
        ),
        (
            [(f"{MEGATRON}/core/pipeline_parallel/p2p_communication.py", 2, "_communicate"), MAIN],
            Place.EXCHANGE,
            "in _communicate, pipeline_parallel/p2p_communication.py line 2 in _communicate",
        ),
        (
            [
                (f"{TORCH}/distributed/rendezvous.py", 2, "_create_c10d_store"),
                (f"{TORCH}/distributed/rendezvous.py", 3, "_env_rendezvous_handler"),
                (f"{TORCH}/distributed/distributed_c10d.py", 2, "init_process_group"),
                MAIN,
            ],
            Place.EXCHANGE,
            "in init_process_group, job/train.py line 31 in main",
        ),
        (
            [(f"{TORCH}/distributed/distributed_c10d.py", 2, "destroy_process_group"), MAIN],
            Place.TEARDOWN,
            "in destroy_process_group, job/train.py line 31 in main",
        ),
        (
            [(f"{LIB}/threading.py", 2, "_shutdown")],
            Place.TEARDOWN,
            "in _shutdown, python3.11/threading.py line 2 in _shutdown",
        ),
        (
            [
                ("/src/mt_resilient/training/boundary/allreduce.py", 2, "_heard"),
                ("/src/mt_resilient/training/boundary/allreduce.py", 3, "reduced"),
                ("/src/mt_resilient/training/boundary/boundary.py", 4, "boundary"),
                MAIN,
            ],
            Place.BOUNDARY,
            "at the boundary of its step",
        ),
        (
            [
                ("/src/mt_resilient/resilience/ipc/board_layout.py", 2, "hear"),
                ("/src/mt_resilient/training/boundary/allreduce.py", 2, "_heard"),
                MAIN,
            ],
            Place.BOUNDARY,
            "at the boundary of its step",
        ),
        (
            [
                (f"{LIB}/threading.py", 2, "wait"),
                (f"{LIB}/queue.py", 2, "get"),
                (f"{TORCH}/utils/data/dataloader.py", 2, "_try_get_data"),
                ("/src/mt_resilient/training/data/worker_rng.py", 3, "_next_data"),
                (f"{TORCH}/utils/data/dataloader.py", 3, "__next__"),
                ("/src/mt_resilient/training/data/batches.py", 3, "__iter__"),
                MAIN,
            ],
            Place.DATA,
            "in its data loader, job/train.py line 31 in main",
        ),
        (
            [(f"{TORCH}/autograd/graph.py", 2, "_engine_run_backward"), (f"{TORCH}/_tensor.py", 2, "backward"), MAIN],
            Place.PERHAPS,
            "in its backward pass, job/train.py line 31 in main",
        ),
        (
            [(f"{TORCH}/cuda/__init__.py", 2, "synchronize"), MAIN],
            Place.PERHAPS,
            "for its device, job/train.py line 31 in main",
        ),
        # What a wrapper of torch.distributed further out runs is its own.
        (
            [
                ("/job/model.py", 7, "forward"),
                (f"{TORCH}/nn/modules/module.py", 2, "_call_impl"),
                (f"{TORCH}/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 2, "pre_forward"),
                MAIN,
            ],
            Place.ELSEWHERE,
            "at job/model.py line 7 in forward",
        ),
        (
            [(f"{TORCH}/distributed/utils.py", 2, "_verify_param_shape_across_processes"), MAIN],
            Place.COLLECTIVE,
            "in _verify_param_shape_across_processes, job/train.py line 31 in main",
        ),
        (
            [(f"{TORCH}/distributed/utils.py", 2, "_to_kwargs"), MAIN],
            Place.ELSEWHERE,
            "in _to_kwargs, at job/train.py line 31 in main",
        ),
        # Nor is a checkpoint's file a collective.
        (
            [(f"{TORCH}/distributed/checkpoint/filesystem.py", 2, "write"), MAIN],
            Place.ELSEWHERE,
            "in write, at job/train.py line 31 in main",
        ),
        (
            [(f"{LIB}/socket.py", 2, "recv_into"), (f"{LIB}/site-packages/urllib3/connection.py", 2, "read"), MAIN],
            Place.ELSEWHERE,
            "in recv_into, at job/train.py line 31 in main",
        ),
        # A script may call a function of its own as it likes.
        (
            [("/job/upload.py", 7, "log_shutdown"), MAIN],
            Place.ELSEWHERE,
            "at job/upload.py line 7 in log_shutdown",
        ),
        (
            [(f"{LIB}/threading.py", 2, "join"), (f"{TORCH}/utils/data/dataloader.py", 2, "_shutdown_workers"), MAIN],
            Place.ELSEWHERE,
            "in join, at job/train.py line 31 in main",
        ),
        ([], Place.PERHAPS, "in no Python code"),
    ],
)
def test_where_a_rank_stands(stack: list[tuple[str, int, str]], place: Place, words: str) -> None:
    spot = locate(frames(*stack))
    assert (spot.place, spot.words) == (place, words)


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("", Place.ELSEWHERE),
        ("x = compute(y)", Place.ELSEWHERE),
        ("loss = total.item()", Place.PERHAPS),
        ("time.sleep(float(pause))", Place.ELSEWHERE),
        ("work.wait()", Place.PERHAPS),
        ("print(float(loss))", Place.PERHAPS),
        ("batch = batch.to(device)", Place.PERHAPS),
    ],
)
def test_a_line_that_waits_in_c_is_no_proof_of_anything(code: str, place: Place) -> None:
    assert locate(frames(MAIN), code).place is place


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("stream.sendall(weights.cpu().numpy().tobytes())", Place.ELSEWHERE),
        ("receive.wait()", Place.PERHAPS),  # the recorder's summary has no sends and receives
        ("os.wait()", Place.ELSEWHERE),
    ],
)
def test_such_a_line_works_if_nothing_is_queued_for_which_it_could_wait(code: str, place: Place) -> None:
    assert locate(frames(MAIN), code, queued=False).place is place


TEXT = """Thread 0x00007f0000000002 (most recent call first):
  File "/lib/threading.py", line 320 in wait
  <truncated rest>
Thread 0x00007f0000000003 [loader] (most recent call first):
  <no Python frame>

Current thread 0x00007f0000000001 (most recent call first):
  File "/job/odd "name".py", line ??? in forward
  File "/job/train.py", line 31 in main
  File "/job/train.py", line 40 in <mod"""


def test_what_only_measures_is_not_there() -> None:
    text = "\n".join(
        [
            "Current thread 0x0000000000000001 (most recent call first):",
            '  File "/env/lib/python3.11/site-packages/mt_resilient/training/boundary/step_timer.py", line 88 in backward',
            f'  File "{TORCH}/distributed/distributed_c10d.py", line 4 in barrier',
            '  File "/job/train.py", line 31 in main',
        ]
    )
    assert locate(parse(text)[1]).place is Place.COLLECTIVE


def test_all_threads_are_read_by_their_number() -> None:
    assert parse(TEXT) == {
        0x7F0000000002: (Frame("/lib/threading.py", 320, "wait"),),
        0x7F0000000003: (),
        0x7F0000000001: (
            Frame('/job/odd "name".py', 0, "forward"),
            Frame("/job/train.py", 31, "main"),
            Frame("/job/train.py", 40, "<mod"),
        ),
    }


@pytest.mark.parametrize("text", ["", "nonsense", "  File", "Thread 0xZZ"])
def test_what_is_no_stack_is_none(text: str) -> None:
    assert parse(text) == {}


def test_what_this_python_writes_is_understood(tmp_path: Path) -> None:
    """In a process of its own: of more than 100 threads, it writes only some."""
    script = tmp_path / "script.py"
    script.write_text("import faulthandler\ndef dumps():\n    faulthandler.dump_traceback(all_threads=True)\ndumps()\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    (stack,) = parse(done.stderr).values()
    assert stack == (Frame(str(script), 3, "dumps"), Frame(str(script), 4, "<module>"))


def test_while_one_read_of_the_disk_hangs_no_further_one_is_waited_for() -> None:
    goes_on = threading.Event()
    assert stack_sampler._soon(lambda: str(goes_on.wait(600))) == ""
    (hanging,) = stack_sampler._reading
    assert [stack_sampler._soon(lambda: "read") for _ in range(8)] == [""] * 8
    assert stack_sampler._reading == [hanging], "no further one was begun"
    goes_on.set()
    hanging.join(60)
    eventually(lambda: stack_sampler._soon(lambda: "read") == "read")
