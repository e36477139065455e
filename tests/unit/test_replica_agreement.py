"""Who has to hold the same bits, when that is believed, what is apart, and who is wrong."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.checkpoint.format.replica_agreement import (
    Words,
    comparisons,
    convicted,
    digest,
    parameters,
    wrong,
)
from mt_resilient.checkpoint.format.replica_ledger import TRUSTED, Apart, Ledger
from mt_resilient.checkpoint.format.sharding import Part
from mt_resilient.checkpoint.format.tensor_table import Table, plan

A, B, C = 10, 11, 12


@pytest.mark.parametrize(
    ("held", "who"),
    [
        ([A, A], []),
        ([A, B], None),
        ([A, A, A], []),
        ([A, B, A], [1]),
        ([A, B, C], None),
        ([A, A, B, B], None),
        ([B, A, A, A], [0]),
        ([A, A, B, C], None),
        ([A, A, A, B, C], [3, 4]),
        ([A], []),
        ([], []),
    ],
)
def test_ranks_that_differ_from_the_majority_are_wrong(held: list[int], who: list[int] | None) -> None:
    found = wrong(dict(enumerate(held)))
    assert (None if found is None else sorted(found)) == who


@given(st.dictionaries(st.integers(0, 9), st.integers(0, 3)))
def test_a_rank_in_the_majority_is_never_wrong(words: dict[int, int]) -> None:
    found = wrong(words)
    if found is None:
        assert all(2 * [*words.values()].count(word) <= len(words) for word in words.values())
    else:
        assert 2 * len(found) < max(1, len(words))
        assert len({word for rank, word in words.items() if rank not in found}) <= 1
        assert not {words[rank] for rank in found} & {word for rank, word in words.items() if rank not in found}


@pytest.mark.parametrize(("right", "who"), [(A, [1]), (B, [0]), (C, None)])
def test_a_replay_shows_which_ranks_were_wrong(right: int, who: list[int] | None) -> None:
    found = convicted({0: A, 1: B}, right)
    assert (None if found is None else sorted(found)) == who


Spec = tuple[str, str, str]
"""Name in the table, dtype, name of the global tensor with the place in it, or TRAINED, or nothing."""
TRAINED = "?"
"""Nobody knows its place, and an optimizer names it."""


def table(*specs: Spec, replica: int = 0) -> Table:
    """Tensors of four elements, each a quarter of a global one."""
    parts = {}
    for name, _, place in specs:
        if place not in ("", TRAINED):
            whole, _, quarter = place.partition("@")
            at = 4 * int(quarter or 0)
            parts[name] = [Part(name=whole, shape=(16,), offset=(at,), box=(4,), replica=(replica,))]
    trained = [name for name, _, place in specs if place == TRAINED]
    return plan(None, [(name, dtype, (4,)) for name, dtype, _ in specs], parts, trained)


WEIGHT = ("model/w", "float32", "model/w")
NORM = ("model/norm", "float32", "model/norm")
BUFFER = ("model/mean", "float32", "model/mean")
COUNTER = ("model/seen", "int64", "model/seen")
MOMENT = ("opt/0/state/0.0/exp_avg", "float32", "opt/exp_avg/model/w")
RANDOM = ("randomness/cpu", "uint8", "")


def cut(spec: Spec, quarter: int) -> Spec:
    return spec[0], spec[1], f"{spec[2]}@{quarter}"


def bare(spec: Spec, trained: str = TRAINED) -> Spec:
    return spec[0], spec[1], trained


REPLICATED = [table(WEIGHT, NORM, COUNTER, MOMENT, RANDOM, replica=rank) for rank in range(3)]


def named(tables: Sequence[Table]) -> list[tuple[tuple[int, ...], list[str]]]:
    return [(each.ranks, sorted(each.names)) for each in comparisons(tables)]


@pytest.mark.parametrize(
    ("tables", "compared"),
    [
        # What no optimizer trains is alike only now and then.
        (REPLICATED, [((0, 1, 2), ["model/w", "opt/0/state/0.0/exp_avg"])]),
        (REPLICATED[:1], []),
        # Tensor parallel: the norm is on both, and nobody promises that it stays the same to the last bit.
        ([table(cut(WEIGHT, n), NORM) for n in range(2)], []),
        # Two by two: replicas are those that hold the same quarter.
        (
            [table(cut(WEIGHT, n % 2), NORM, cut(MOMENT, n % 2)) for n in range(4)],
            [(ranks, ["model/w", "opt/0/state/0.0/exp_avg"]) for ranks in ((0, 2), (1, 3))],
        ),
        # A distributed optimizer: its shards are on one rank each.
        ([table(WEIGHT, cut(MOMENT, n)) for n in range(2)], [((0, 1), ["model/w"])]),
        # Fully sharded.
        ([table(cut(WEIGHT, n), cut(MOMENT, n)) for n in range(2)], []),
        # A state that nobody knows the place of (factored, say) is compared by its name.
        (
            [table(WEIGHT, bare(MOMENT)) for _ in range(2)],
            [((0, 1), ["opt/0/state/0.0/exp_avg"])],
        ),
        # Plain SGD has no state: nobody tells its parameters from the statistics of a BatchNorm.
        ([table(WEIGHT, BUFFER) for _ in range(2)], []),
        # No places at all.
        (
            [table(bare(WEIGHT), bare(BUFFER, ""), bare(MOMENT), bare(COUNTER), RANDOM) for _ in range(2)],
            [((0, 1), ["model/w", "opt/0/state/0.0/exp_avg"])],
        ),
        ([table(bare(WEIGHT)), table(bare(NORM))], []),
    ],
)
def test_which_ranks_and_tensors_are_compared(
    tables: list[Table], compared: list[tuple[tuple[int, ...], list[str]]]
) -> None:
    assert named(tables) == compared


def words(tables: Sequence[Table], value: int, **odd: tuple[int, int]) -> list[Words]:
    """Fingerprints: every tensor has `value`, but for the last part of a name: (rank, value)."""
    found = [np.full(len(each.pieces), value, np.uint64) for each in tables]
    for name, (rank, other) in odd.items():
        number = next(n for n, p in enumerate(tables[rank].pieces) if p.name.split("/")[-1] == name)
        found[rank][number] = other
    return found


def trusting(tables: Sequence[Table]) -> Ledger:
    ledger = Ledger(tables)
    for value in range(TRUSTED):
        assert ledger.look(words(tables, value)) == []
    return ledger


def test_a_trusted_tensor_that_differs_is_reported() -> None:
    ledger = trusting(REPLICATED)
    assert ledger.compared == 2
    assert ledger.look(words(REPLICATED, 20, w=(1, 21))) == [Apart(name="model/w", words={0: 20, 1: 21, 2: 20})]
    assert ledger.look(words(REPLICATED, 22)) == []
    assert ledger.value("model/w", (0, 1, 2), words(REPLICATED, 23)) == 23
    assert ledger.value("model/w", (0, 1, 2), words(REPLICATED, 23, w=(0, 1))) is None
    (found,) = trusting(REPLICATED).look(words(REPLICATED, 20, exp_avg=(2, 21)))
    assert found.name == "opt/0/state/0.0/exp_avg", "moments are compared too"


def test_a_tensor_that_differs_before_it_is_trusted_is_never_compared() -> None:
    tables = [table(WEIGHT, MOMENT) for _ in range(2)]
    ledger = Ledger(tables)
    assert ledger.look(words(tables, 0)) == []  # all start with the same
    for value in range(1, 9):
        assert ledger.look(words(tables, value, w=(1, 100 + value))) == []
    (found,) = ledger.look(words(tables, 20, w=(1, 5), exp_avg=(1, 21)))
    assert found.name == "opt/0/state/0.0/exp_avg"


def test_ranks_whose_moments_differ_early_train_independently() -> None:
    """Local SGD makes the parameters equal every few steps, and all early snapshots may be of such steps."""
    tables = [table(WEIGHT, MOMENT) for _ in range(2)]
    ledger = Ledger(tables)
    for value in range(9):
        assert ledger.look(words(tables, value, exp_avg=(1, 100 + value))) == []
    assert ledger.look(words(tables, 20, exp_avg=(1, 5), w=(1, 21))) == []
    assert ledger.compared == 0


OTHER_MOMENTS = [(f"opt/0/state/{n}/exp_avg", "float32", f"opt/exp_avg/model/w{n}") for n in (1, 2)]


def test_one_moment_that_differs_early_is_dropped_alone() -> None:
    """As after a flipped bit. The comparison ends only if most moments differ."""
    tables = [table(WEIGHT, MOMENT, *OTHER_MOMENTS) for _ in range(2)]
    moments = [n for n, piece in enumerate(tables[0].pieces) if piece.name.endswith("exp_avg")]

    def shown(value: int, *odd: int) -> list[Words]:
        found = words(tables, value)
        found[1][list(odd)] = 1000 + value
        return found

    ledger = Ledger(tables)
    ledger.look(shown(0))
    ledger.look(shown(1, moments[0]))
    assert (ledger.early, ledger.blind) == ((tables[0].pieces[moments[0]].name,), False)
    for value in range(2, 6):
        assert ledger.look(shown(value, moments[0])) == []
        assert ledger.early == (), "it is told once"
    assert ledger.compared == 3
    (found,) = ledger.look(words(tables, 20, w=(1, 21)))
    assert found.name == "model/w"
    most = Ledger(tables)
    most.look(shown(0, *moments[:2]))
    assert most.blind
    for value in range(1, 6):
        most.look(shown(value))
    assert most.compared == 0


def test_without_known_positions_nobody_expects_replicas() -> None:
    tables = [table(bare(WEIGHT), bare(MOMENT)) for _ in range(2)]
    ledger = Ledger(tables)
    ledger.look(words(tables, 0, w=(1, 7), exp_avg=(1, 7)))
    assert (ledger.early, ledger.blind) == ((), False)


def unplaced(name: str) -> list[Table]:
    return [table(bare(WEIGHT), bare(MOMENT), (name, "float32", "")) for _ in range(2)]


@pytest.mark.parametrize(
    ("tables", "name"),
    [
        (REPLICATED, "cpu"),  # a generator
        (REPLICATED, "seen"),  # a counter
        # Without known positions, what no optimizer names. Gradients are equal after a reduction, and not before it.
        (unplaced("model/mean"), "mean"),
        (unplaced("randomness/gradients/sums/0"), "0"),
        (unplaced("metrics/average"), "average"),
    ],
)
def test_tensors_that_may_be_equal_by_chance_are_never_compared(tables: list[Table], name: str) -> None:
    assert trusting(tables).look(words(tables, 20, **{name: (1, 21)})) == []


def test_statistics_of_a_batch_are_not_compared() -> None:
    """DistributedDataParallel makes buffers alike in each forward pass: all snapshots may lie behind one. The next batch makes them
    differ, and that was taken for a fault of the machine: the third one ended a healthy job."""
    tables = [table(WEIGHT, BUFFER, MOMENT) for _ in range(2)]
    ledger = trusting(tables)
    assert ledger.look(words(tables, 20, mean=(1, 21))) == []
    (found,) = ledger.look(words(tables, 22, mean=(1, 23), w=(1, 24)))
    assert found.name == "model/w"


def test_a_tensor_that_never_changes_is_never_trusted() -> None:
    ledger = Ledger(REPLICATED)
    for _ in range(20):
        assert ledger.look(words(REPLICATED, 7)) == []
    assert ledger.compared == 0
    assert ledger.look(words(REPLICATED, 7, w=(1, 8))) == []


def test_without_known_positions_nothing_is_trusted_before_the_whole_optimizer() -> None:
    """Ranks of a tensor-parallel group have tensors of the same names and shapes, and a few that are the same indeed."""
    tables = [table(bare(WEIGHT), bare(NORM), bare(MOMENT)) for _ in range(2)]
    parallel = Ledger(tables)
    for value in range(9):
        assert parallel.look(words(tables, value, w=(1, 100 + value), exp_avg=(1, 200 + value))) == []
    assert parallel.look(words(tables, 20, norm=(1, 21), w=(1, 3), exp_avg=(1, 4))) == []
    (found,) = trusting(tables).look(words(tables, 20, norm=(1, 21)))
    assert found.name == "model/norm"


ones = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=40)


@given(ones)
def test_a_tensor_is_reported_only_if_it_was_equal_before(seen: list[tuple[int, int, bool]]) -> None:
    """Whatever is shown: a finding is about ranks that held TRUSTED different values together, one after the other, and never differed
    before that."""
    tables = REPLICATED[:2]
    ledger, together, apart_early = Ledger(tables), [], False
    for value, odd, differs in seen:
        shown = words(tables, value, **({"w": (1, 50 + odd)} if differs else {}))
        found = ledger.look(shown)
        assert bool(found) == (differs and len(together) >= TRUSTED and not apart_early)
        apart_early = apart_early or (differs and len(together) < TRUSTED)
        if not differs and together[-1:] != [value]:
            together.append(value)


def test_parameters_are_the_tensors_that_an_optimizer_names() -> None:
    tables = [table(WEIGHT, NORM, COUNTER, MOMENT), table(WEIGHT, NORM)]
    names = [[t.pieces[n].name for n in numbers] for t, numbers in zip(tables, parameters(tables), strict=True)]
    assert names == [["model/w"], ["model/w"]]
    (alone,) = parameters([table(WEIGHT, NORM, COUNTER)])
    assert len(alone) == 2


@pytest.mark.parametrize(
    ("specs", "rows"),
    [
        (
            [WEIGHT, NORM, COUNTER, BUFFER, MOMENT, RANDOM],
            ["model/w", "opt/0/state/0.0/exp_avg"],
        ),  # what is trained, and how
        ([WEIGHT, NORM, cut(MOMENT, 1)], ["model/norm", "model/w"]),  # nobody here knows what the other shards are of
        ([cut(WEIGHT, 1), cut(MOMENT, 1)], ["model/w", "opt/0/state/0.0/exp_avg"]),
        ([WEIGHT, bare(MOMENT)], ["model/w"]),
        ([WEIGHT, NORM], None),  # nor what is trained
        ([bare(WEIGHT), bare(BUFFER, ""), bare(MOMENT), bare(COUNTER), RANDOM], ["model/w", "opt/0/state/0.0/exp_avg"]),
        ([COUNTER, RANDOM], None),
    ],
)
def test_which_tensors_a_node_s_digest_covers(specs: list[Spec], rows: list[str] | None) -> None:
    found = digest([table(*specs), table(*reversed(specs))])
    if rows is None:
        assert found is None
        return
    assert found
    for each, held in zip((table(*specs), table(*reversed(specs))), found.rows, strict=True):
        assert sorted(each.pieces[n].name for n in held) == rows


def test_nodes_are_replicas_if_their_ranks_hold_the_same_parts_one_by_one() -> None:
    low, high = (table(cut(WEIGHT, n), cut(MOMENT, n)) for n in range(2))
    other = table(cut(WEIGHT, 0), cut(MOMENT, 0), replica=1)
    models = [found.model for each in ([low, high], [other, high], [high, low], [low]) if (found := digest(each))]
    assert models[0] == models[1]
    assert len({*models}) == 3


def test_a_digest_covers_each_bit_of_its_tensors_and_no_other() -> None:
    found = digest([table(WEIGHT, COUNTER, MOMENT), table(WEIGHT, COUNTER, MOMENT)])
    assert found
    words = [np.array([1, 2, 5], np.uint64), np.array([3, 4, 6], np.uint64)]
    assert found.of(words) == found.of([np.array([1, 9, 5], np.uint64), words[1]])
    other = {found.of(words), found.of([words[0] ^ np.uint64(1), words[1]]), found.of(words[::-1])}
    assert len(other) == 3
    assert all(0 <= each < 1 << 48 for each in other)
