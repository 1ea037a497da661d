"""What has not left can be taken back; aborts go first."""

from __future__ import annotations

from trio_engine.client.outbox import Outbox


def test_messages_leave_in_order() -> None:
    outbox = Outbox()
    outbox.append("a", [b"a"])
    outbox.append(1, [b"call"])
    outbox.append("b", [b"b"])
    assert len(outbox) == 3
    assert [outbox.pop(), outbox.pop(), outbox.pop(), outbox.pop()] == [
        [b"a"],
        [b"call"],
        [b"b"],
        None,
    ]


def test_an_unsent_request_is_withdrawn_and_not_aborted() -> None:
    outbox = Outbox()
    outbox.append("a", [b"a"])
    outbox.abort("a")
    assert outbox.pop() is None
    assert outbox.pop_aborts() == []


def test_a_sent_request_is_aborted_once() -> None:
    outbox = Outbox()
    outbox.append("a", [b"a"])
    outbox.pop()
    outbox.abort("a")
    outbox.abort("b")
    assert len(outbox) == 2
    assert outbox.pop_aborts() == ["a", "b"]
    assert outbox.pop_aborts() == []
    assert len(outbox) == 0


def test_withdrawing_tells_whether_it_was_there() -> None:
    outbox = Outbox()
    outbox.append(7, [b"call"])
    assert outbox.withdraw(7)
    assert not outbox.withdraw(7)


def test_clearing_drops_messages_and_aborts() -> None:
    outbox = Outbox()
    outbox.append("a", [b"a"])
    outbox.abort("b")
    outbox.clear()
    assert len(outbox) == 0
