"""Instances of classes are found, and nothing else in the process notices."""

from collections.abc import Iterator

from torch import nn, optim

from mt_resilient.training.live_instances import live_instances


class Own(optim.SGD):
    pass


def test_instances_of_subclasses_are_found() -> None:
    own, stranger = Own(nn.Linear(1, 1).parameters(), lr=0.1), nn.Linear(1, 1)
    found = live_instances(optim.Optimizer)
    assert [each for each in found if each is own] == [own]
    assert not any(each is stranger for each in found)


def test_a_tuple_in_the_making_can_still_grow() -> None:
    """As in DataLoader's thread that pins batches. After `gc.get_objects`, the tuple can no longer be resized: SystemError."""
    kept: list[object] = []

    def batch() -> Iterator[int]:
        for number in range(100):
            if number == 15:
                kept.append(live_instances(optim.Optimizer))
            yield number

    assert tuple(batch()) == tuple(range(100))
