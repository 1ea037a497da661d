"""A request's counts of tokens, and what it takes over from the struct that came."""

from __future__ import annotations

import pytest

from tests.unit.core.core_parts import make_request, make_source
from trio_engine.core.lifecycle import RequestEvent, RequestStatus
from trio_engine.core.request import NO_SLOT, Request


def test_a_new_request_waits_with_nothing() -> None:
    request = make_request(prompt=3)
    assert request.status is RequestStatus.WAITING
    assert (request.slot, request.block_ids, request.is_resident) == (NO_SLOT, [], False)
    assert (request.num_planned_tokens, request.num_unsettled_tokens) == (0, 0)
    assert (list(request.token_ids), request.num_output_tokens) == ([0, 1, 2], 0)
    assert not request.is_finished


def test_tokens_are_a_copy_so_that_the_client_s_list_stays_as_it_is() -> None:
    prompt = [1, 2]
    source = make_source(prompt=prompt)
    source.prompt_token_ids = prompt
    assert source.sampling_params is not None
    request = Request(source, source.sampling_params, 64)
    request.token_ids.append(3)
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "total"),
    [(5, 64, 8), (100, 64, 64), (61, 64, 64), (None, 9, 9)],
)
def test_the_total_is_cut_by_max_tokens_or_max_model_len(
    max_tokens: int | None, max_model_len: int, total: int
) -> None:
    request = make_request(prompt=3, max_tokens=max_tokens, max_model_len=max_model_len)
    assert request.max_total_tokens == total


def test_an_unsettled_token_counts_as_a_token_but_not_as_output() -> None:
    request = make_request(prompt=3)
    request.num_planned_tokens, request.num_unsettled_tokens = 3, 1
    assert (request.num_output_tokens, request.num_tokens_to_plan) == (0, 1)


def test_nothing_is_planned_once_the_last_token_is_drawn_though_not_known() -> None:
    request = make_request(prompt=3, max_tokens=2)
    request.token_ids.append(9)
    request.num_planned_tokens = 3
    assert request.num_tokens_to_plan == 1
    request.num_planned_tokens, request.num_unsettled_tokens = 4, 1
    assert request.num_tokens_to_plan == 0


def test_the_key_tells_clients_apart() -> None:
    assert make_request("x", client_index=0).key != make_request("x", client_index=1).key
    assert make_request("x", client_index=1).key == (1, "x")


def test_requests_are_compared_by_identity_as_ids_are_used_again() -> None:
    first, second = make_request("x"), make_request("x")
    assert first != second
    assert len({first, second}) == 2


def test_an_impossible_event_leaves_the_status() -> None:
    request = make_request()
    with pytest.raises(AssertionError, match="preempt cannot happen to a waiting request"):
        request.advance(RequestEvent.PREEMPT)
    assert request.status is RequestStatus.WAITING


def test_a_request_is_finished_by_its_terminal_event_only() -> None:
    request = make_request()
    request.advance(RequestEvent.SCHEDULE)
    assert not request.is_finished
    request.advance(RequestEvent.STOP)
    assert request.is_finished


def test_stop_ids_and_headers_are_taken_over() -> None:
    request = make_request(
        source_fields={"trace_headers": {"traceparent": "t"}}, stop_token_ids=[7, 7, 5]
    )
    assert request.stop_token_ids == {5, 7}
    assert request.trace_headers == {"traceparent": "t"}
    assert make_request().stop_token_ids == frozenset()


def test_repr_shows_what_a_bug_report_needs() -> None:
    request = make_request("abc", client_index=2, prompt=3)
    request.token_ids.append(9)
    request.num_planned_tokens, request.num_unsettled_tokens = 4, 1
    request.block_ids = [0, 1]
    assert repr(request) == (
        "<Request 'abc' of client 2 waiting prompt=3 output=1+1 planned=4 blocks=2>"
    )
