"""Which batch a step uses."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_resilient.resilience.errors import UsageError
from mt_resilient.resilience.model.data_windows import Window, ahead, batch, following, jump, merged

several = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda w: Window(w[0], w[0] + w[1])), max_size=6
)


@given(several)
def test_steps_use_all_batches_but_those_in_windows_once_and_in_order(windows: list[Window]) -> None:
    left_out = {n for window in windows for n in range(window.start, window.stop)}
    assert [batch(step, windows) for step in range(60)] == [n for n in range(200) if n not in left_out][:60]


@given(several)
def test_jumps_are_what_lies_between_the_batches_of_two_steps(windows: list[Window]) -> None:
    used = [batch(step, windows) for step in range(60)]
    assert [jump(step, windows) for step in range(60)] == [
        used[0],
        *(later - earlier - 1 for earlier, later in pairwise(used)),
    ]


@given(several)
def test_merged_windows_hold_the_same_batches_and_do_not_touch(windows: list[Window]) -> None:
    found = merged(windows)
    assert {n for w in found for n in range(w.start, w.stop)} == {n for w in windows for n in range(w.start, w.stop)}
    assert all(earlier.stop < later.start for earlier, later in pairwise(found))


@given(several, several, st.integers(0, 40))
def test_a_state_keeps_its_past_whatever_is_known_later(past: list[Window], known: list[Window], step: int) -> None:
    """The steps before it have used the batches that they have used, and those after it leave out what lies ahead of them."""
    found = ahead(step, past, known)
    assert [batch(n, found) for n in range(step)] == [batch(n, past) for n in range(step)]
    last = batch(step - 1, past) if step else -1
    beyond = {n for w in known if w.start > last for n in range(w.start, w.stop)}
    assert not beyond & {batch(n, found) for n in range(step, step + 60)}


def test_a_window_that_begins_where_the_state_ends_is_ahead() -> None:
    assert ahead(100, [], [Window(100, 300)]) == (Window(100, 300),)
    assert ahead(101, [Window(100, 300)], [Window(100, 300)]) == (Window(100, 300),)
    assert ahead(100, [Window(100, 300)], [Window(250, 350)]) == (Window(100, 350),)
    assert ahead(120, [], [Window(100, 300)]) == ()  # computed with that data: it is too late


@pytest.mark.parametrize("text", ["", "3", "3:", ":3", "5:5", "6:5", "-1:5", "a:b", "1:2:3"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no window of data"):
        Window.parse(text)


def test_a_window_is_parsed_from_its_own_text() -> None:
    assert str(Window.parse("120:140")) == "120:140"


@given(several, st.integers(0, 40), st.integers(1, 20))
def test_what_follows_are_the_next_batches_that_would_be_used(known: list[Window], step: int, count: int) -> None:
    window = following(step, count, known)
    would = [batch(n, known) for n in range(step, step + count)]
    assert {*would} <= {*range(window.start, window.stop)}
    without = (*known, window)
    assert [batch(n, without) for n in range(step)] == [batch(n, known) for n in range(step)]
    assert batch(step, without) == batch(step + count, known)
