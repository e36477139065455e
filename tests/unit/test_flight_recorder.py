"""What torch's flight recorders hold → which ranks hold up the others. The texts have torch's own form (FlightRecorderDetail.hpp)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mt_resilient.resilience.detect import flight_recorder
from mt_resilient.resilience.detect.flight_recorder import Finding, Kind, line, read, summary
from mt_resilient.resilience.model.collectives import GroupCalls
from mt_resilient.resilience.model.types import Rank


def entry(
    number: int, name: str = "nccl:all_reduce", group: tuple[str, str] = ("0", "default_pg"), **fields: Any
) -> dict[str, Any]:
    return {
        "record_id": number - 1,
        "pg_id": int(group[0]),
        "process_group": [*group],
        "thread_name": "pt_main_thread",
        "thread_id": "140357537422208",
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "time_created_ns": 1795816088439502906,
        "input_sizes": [[4096, 64]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 64]],
        "output_dtypes": ["BFloat16"],
        "state": "completed",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 1795816088439602906,
        "retired": True,
        "timeout_ms": 600000,
        "is_p2p": False,
        **fields,
    }


def waits(number: int, name: str = "nccl:all_reduce", state: str = "scheduled", **fields: Any) -> dict[str, Any]:
    return entry(number, name, state=state, retired=False, time_discovered_completed_ns=0, **fields)


def recorded(*entries: dict[str, Any], groups: dict[str, str] | None = None) -> str:
    config = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in (groups or {"0": "[0, 1]"}).items()}
    status = {"0": {"last_enqueued_collective": "1", "last_started_collective": "-1", "last_completed_collective": "1"}}
    return json.dumps(
        {"version": "2.10", "comm_lib_version": "2.27.5", "pg_config": config, "pg_status": status, "entries": entries}
    )


def told(*texts: str) -> dict[Rank, tuple[GroupCalls, ...]]:
    """Of rank 0, rank 1, …, by the way that they take: the rank, a line among stacks, the agent."""
    return {Rank(n): read(f"Thread 0x1\n\n{line(summary([text]))}\n") for n, text in enumerate(texts)}


def judge(told: dict[Rank, tuple[GroupCalls, ...]], *silent: int) -> Finding | None:
    """silent: further ranks, which tell nothing."""
    return flight_recorder.judge(told, [*told, *map(Rank, silent)])


def test_two_ranks_in_different_collectives() -> None:
    found = judge(told(recorded(entry(1), waits(2)), recorded(entry(1), waits(2, "nccl:_all_gather_base"))))
    assert found
    assert (found.kind, found.ranks) == (Kind.MISMATCH, ())
    assert found.sentence == (
        "the ranks differ at collective 2 of the group of all ranks: rank 0 called all_reduce of 4096x64 BFloat16, "
        "and rank 1 called _all_gather_base of 4096x64 BFloat16"
    )


def test_one_of_three_with_another_size() -> None:
    three = [recorded(waits(1)), recorded(waits(1)), recorded(waits(1, input_sizes=[[7]]))]
    found = judge(told(*three))
    assert found
    assert (found.kind, found.ranks) == (Kind.MISMATCH, (2,))


def test_sizes_may_differ_where_the_collective_allows_it() -> None:
    found = judge(told(*(recorded(waits(1, "nccl:all_to_all", input_sizes=[[n]])) for n in (5, 7))))
    assert found
    assert found.kind is Kind.LINK


def test_a_rank_that_has_not_called_it() -> None:
    found = judge(told(recorded(entry(1), entry(2), waits(3), waits(4)), recorded(entry(1), entry(2))))
    assert found
    assert (found.kind, found.ranks) == (Kind.MISSING, (1,))
    assert found.sentence == (
        "rank 1 has not called collective 3 of the group of all ranks (all_reduce of 4096x64 BFloat16), in which rank 0 waits"
    )


def test_a_rank_that_has_called_nothing_of_the_group() -> None:
    tp = ("5", "TENSOR_MODEL_PARALLEL_GROUP")
    groups = {"0": "[0, 1]", "5": "[0, 1]"}
    found = judge(told(recorded(entry(1), waits(1, group=tp), groups=groups), recorded(entry(1), groups=groups)))
    assert found
    assert (found.kind, found.ranks) == (Kind.MISSING, (1,))


def test_of_several_groups_the_one_whose_missing_rank_waits_nowhere() -> None:
    """Ranks 0, 1 are one tensor-parallel group, ranks 2, 3 the other; 0, 2 and 1, 3 hold the same parameters. Rank 3 does nothing. Ranks 1
    and 2 wait for it, and rank 0 waits for rank 2."""
    left, right, even, odd = ("1", "TP"), ("2", "TP"), ("3", "DP"), ("4", "DP")
    groups = {"1": "[0, 1]", "2": "[2, 3]", "3": "[0, 2]", "4": "[1, 3]"}
    found = judge(
        told(
            recorded(entry(1, group=left), waits(5, group=even), groups=groups),
            recorded(entry(1, group=left), waits(5, group=odd), groups=groups),
            recorded(waits(9, group=right), entry(4, group=even), groups=groups),
            recorded(entry(8, group=right), entry(4, group=odd), groups=groups),
        )
    )
    assert found
    assert (found.kind, found.ranks) == (Kind.MISSING, (3,))
    assert "of the group of ranks 1, 3" in found.sentence or "of the group of ranks 2, 3" in found.sentence


def test_a_rank_that_is_missing_because_it_waits_elsewhere_is_not_accused() -> None:
    groups = {"1": "[0, 1]", "2": "[1, 2]"}
    waiting = recorded(entry(4, group=("1", "TP")), waits(7, group=("2", "DP")), groups=groups)
    found = judge(told(recorded(waits(5, group=("1", "TP")), groups=groups), waiting), 2)
    assert found
    assert found.ranks == ()


def test_a_device_that_has_not_begun_what_the_others_have() -> None:
    """`TORCH_NCCL_ENABLE_TIMING=1`: the recorder sees when a device begins."""
    before = entry(1, time_discovered_started_ns=5)
    found = judge(
        told(recorded(before, waits(2, state="started", time_discovered_started_ns=9)), recorded(before, waits(2)))
    )
    assert found
    assert (found.kind, found.ranks) == (Kind.DEVICE, (1,))
    assert found.sentence.startswith("the device of rank 1 did not reach collective 2")


def test_what_all_have_called_and_completes_nowhere() -> None:
    found = judge(told(recorded(waits(2)), recorded(waits(2))))
    assert found
    assert (found.kind, found.ranks) == (Kind.LINK, ())


def test_a_rank_that_tells_nothing_may_be_the_missing_one() -> None:
    assert judge(told(recorded(waits(2)), recorded(waits(2))), 2) is None


def test_calls_that_are_not_collectives_and_those_that_are_complete_show_nothing() -> None:
    sends = waits(1, "nccl:send 0->1", is_p2p=True)
    assert judge(told(recorded(entry(1), sends), recorded(entry(1)))) is None
    assert judge({}) is None


def test_a_group_of_thousands_of_ranks_takes_a_few_numbers_and_only_while_a_collective_is_open() -> None:
    names = {"7": ("7", "DP"), "8": ("8", "TP")}
    groups = {"7": str([*range(3, 8192, 8)]), "8": "[0, 1, 2, 9]"}
    entries = [waits(2, group=names["7"]), entry(5, group=names["8"])]
    dp, tp = summary([recorded(*entries, groups=groups)])
    assert (dp.spans, tp.spans) == (((3, 8188, 8),), ())
    (odd,) = summary([recorded(waits(1, group=names["8"]), groups=groups)])
    assert [rank for span in odd.spans for rank in range(*span)] == [0, 1, 2, 9]
    assert len(line((dp, tp))) < 400


def test_groups_of_the_same_name_are_told_apart_by_their_ranks() -> None:
    def of(ranks: str, entry: dict[str, Any]) -> str:
        return recorded(entry, groups={"5": ranks})

    left, right = "[0, 1]", "[2, 3]"
    found = judge(
        told(
            of(left, waits(3, group=("5", "TP"))),
            of(left, entry(2, group=("5", "TP"))),
            of(right, entry(1, group=("5", "TP"))),
            of(right, entry(1, group=("5", "TP"))),
        )
    )
    assert found
    assert (found.kind, found.ranks) == (Kind.MISSING, (1,))


def test_numbers_that_make_no_range_accuse_nobody() -> None:
    calls = GroupCalls(group="5", last=3, open=3, call="all_reduce", spans=((0, 1 << 60, 0), (7, 3, -2), (-5, 1, 1)))
    assert judge({Rank(0): (calls,)}, 1, 2) is None


def test_gloo_says_that_a_call_is_complete_by_retiring_it() -> None:
    """As recorded with torch 2.13: gloo's calls stay `scheduled`, and it names no ranks."""
    done = entry(1, "gloo:all_reduce", state="scheduled", retired=True)
    (calls,) = summary([recorded(done, groups={"": "[]"})])
    assert (calls.last, calls.open, calls.started, calls.spans) == (1, 0, None, ())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"entries": 7}', '{"entries": [7, {}, {"process_group": 3}]}', '{"pg_config": {"0": 1}}'],
)
def test_what_is_no_recording_is_left_out(text: str) -> None:
    assert summary([text]) == ()


@pytest.mark.parametrize(
    "text", ["", "flight recorder: ", "flight recorder: {", 'flight recorder: {"calls": [{"group": 1}]}']
)
def test_what_is_no_summary_is_left_out(text: str) -> None:
    assert read(text) == ()
