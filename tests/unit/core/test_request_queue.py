"""Requests wait by turn; joining, leaving from anywhere and looking at the first are cheap."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tests.unit.core.core_parts import make_request
from tests.unit.core.scheduler_parts import ids
from trio_engine.core.request import Request
from trio_engine.core.request_queue import MIN_DEAD_ENTRIES, RequestQueue


def make_waiting(number: int, *, priority: int = 0) -> Request:
    request = make_request(f"r{number}", 1)
    request.turn = (priority, 0.0, number)
    return request


def test_an_empty_queue_has_nobody_to_look_at() -> None:
    queue = RequestQueue()
    assert (queue.peek(), len(queue), list(queue)) == (None, 0, [])


def test_the_smallest_turn_is_first_whoever_came_first() -> None:
    queue = RequestQueue()
    for number, priority in enumerate([3, 1, 2, 1]):
        queue.add(make_waiting(number, priority=priority))
    assert ids(queue) == ["r1", "r3", "r2", "r0"]
    first = queue.peek()
    assert first is not None
    assert first.request_id == "r1"
    assert len(queue) == 4


def test_whoever_leaves_the_middle_is_never_seen_again() -> None:
    queue = RequestQueue()
    requests = [make_waiting(number) for number in range(3)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[1])
    queue.remove(requests[0])
    assert queue.peek() is requests[2]
    assert ids(queue) == ["r2"]
    queue.remove(requests[2])
    assert queue.peek() is None


def test_a_request_that_left_may_come_again_and_is_here_once() -> None:
    queue = RequestQueue()
    request, other = make_waiting(1), make_waiting(2)
    queue.add(request)
    queue.add(other)
    queue.remove(request)
    queue.add(request)
    assert ids(queue) == ["r1", "r2"]
    queue.remove(request)
    assert queue.peek() is other


def test_a_request_cannot_be_here_twice() -> None:
    queue = RequestQueue()
    request = make_waiting(1)
    queue.add(request)
    with pytest.raises(AssertionError, match="waits already"):
        queue.add(request)


def test_what_those_who_left_leave_behind_is_bounded_by_those_who_are_here() -> None:
    """A client that adds and aborts for ever, behind somebody who waits."""
    queue = RequestQueue()
    queue.add(make_waiting(0))
    for number in range(1, 10_000):
        request = make_waiting(number)
        queue.add(request)
        queue.remove(request)
        assert len(queue._heap) <= 2 * MIN_DEAD_ENTRIES + 2
    assert ids(queue) == ["r0"]


@given(st.lists(st.tuples(st.booleans(), st.integers(-2, 2), st.integers(0, 20)), max_size=200))
def test_the_queue_equals_a_sorted_list(moves: list[tuple[bool, int, int]]) -> None:
    queue, model = RequestQueue(), list[Request]()
    for number, (is_add, priority, index) in enumerate(moves):
        if is_add or not model:
            request = make_waiting(number, priority=priority)
            queue.add(request)
            model.append(request)
        else:
            queue.remove(model.pop(index % len(model)))
        model.sort(key=lambda request: request.turn)
        assert queue.peek() is (model[0] if model else None)
        assert len(queue) == len(model)
    assert list(queue) == model
