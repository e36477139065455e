"""A session outside of `mt-resilient run`."""

import weakref

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from mt_resilient import Session
from mt_resilient.resilience.errors import UsageError


def test_a_loop_runs_as_if_it_were_not_there_and_is_complete_when_all_steps_are_done() -> None:
    session = Session()
    for _ in session.steps(3):
        with session.pausing("evaluation"):
            pass
        session.report(loss=1.0)
        assert not session.complete
    assert session.complete


def test_a_session_pauses_only_for_an_evaluation_or_a_checkpoint() -> None:
    with pytest.raises(UsageError, match="not 'lunch'"), Session().pausing("lunch"):
        pass


def test_a_loop_that_is_left_is_not_complete() -> None:
    session = Session()
    for _ in session.batches([1, 2, 3], epochs=2):
        break
    assert not session.complete


def test_epochs_of_batches_are_those_of_an_ordinary_loop() -> None:
    numbers = torch.arange(11.0)
    sampler: DistributedSampler[int] = DistributedSampler(numbers, num_replicas=2, rank=1)  # type: ignore[arg-type]
    loader = DataLoader(numbers, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    torch.manual_seed(1)
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += [(epoch, batch.tolist(), torch.rand(()).item()) for batch in loader]
    torch.manual_seed(1)
    session, found, ends = Session(), [], []
    for step, batch in session.batches(loader, epochs=3):
        assert step == len(found)
        found.append((session.epoch, batch.tolist(), torch.rand(()).item()))
        ends.append(session.epoch_ends)
    assert found == expected
    assert ends == [False, False, True] * 3
    assert session.complete


def test_steps_of_batches_go_over_the_end_of_an_epoch() -> None:
    session = Session()
    assert [batch for _, batch in session.batches("abc", 5)] == [*"abcab"]
    assert session.complete


def test_a_step_of_several_batches_has_fewer_at_the_end_of_an_epoch() -> None:
    session, found = Session(), []
    for step, batches in session.batches([*"abcde"], epochs=2, accumulate=2):
        found.append((step, "".join(batches) if step != 1 else next(batches), session.epoch_ends))
    parts, ends = ("ab", "c", "e", "ab", "cd", "e"), (False, False, True) * 2
    assert found == [*zip(range(6), parts, ends, strict=True)]


def test_an_epoch_begins_as_the_script_wants() -> None:
    begun: list[int] = []
    assert len([*Session().batches(lambda: iter("ab"), epochs=3, begin_epoch=begun.append)]) == 6
    assert begun == [0, 1, 2]


@pytest.mark.parametrize(
    ("loader", "how", "sentence"),
    [
        (iter("abc"), {"epochs": 1}, "Pass the function that creates it"),
        ("abc", {}, "say how long to train"),
        ("", {"epochs": 1}, "gives no batch"),
    ],
)
def test_a_loader_that_cannot_be_iterated_again_is_refused(loader: object, how: dict[str, int], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        list(Session().batches(loader, **how))  # type: ignore[arg-type]


def test_a_loader_that_the_session_is_given_as_well_is_refused() -> None:
    class Loader(list[int]):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    loader = Loader()
    with pytest.raises(UsageError, match="do not give it to the Session as well"):
        Session(loader=loader).batches(loader, epochs=1)


def test_epochs_are_known_only_of_batches_whose_number_is_known() -> None:
    session = Session()
    with pytest.raises(UsageError, match="takes its batches from"):
        _ = session.epoch
    for _ in session.batches(lambda: iter("ab"), epochs=1):
        with pytest.raises(UsageError, match="does not know how many"):
            _ = session.epoch_ends


def test_steps_begin_after_those_of_the_script_s_own_checkpoint() -> None:
    assert [*Session().steps(5, start=3)] == [3, 4]


def test_the_script_alone_holds_its_batch() -> None:
    for _, batch in Session().batches(lambda: map(torch.zeros, (2, 3)), epochs=2):
        gone = weakref.ref(batch)
        del batch
        assert gone() is None
