"""Who gets which output, and which requests the engine must be told of."""

from __future__ import annotations

import logging
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from trio_engine.client.mailbox_reader import MailboxReader
from trio_engine.client.parent_request import ParentRequest
from trio_engine.client.request import ClientRequest, RequestSpec
from trio_engine.client.request_table import RequestTable
from trio_engine.errors import EngineClosedError, RequestError, RequestFailedError
from trio_engine.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from trio_engine.sampling_params import RequestOutputKind, SamplingParams
from trio_engine.text.processor import TextProcessor
from trio_engine.text.request_text import RequestText, TextDelta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.client.outputs import RequestOutput

PROCESSOR = TextProcessor(None, max_model_len=64)
NUMBERS = count()


def make_request(name: str, text: RequestText | None = None) -> ClientRequest:
    params = SamplingParams(output_kind=RequestOutputKind.DELTA)
    spec = RequestSpec.of([1, 2], params, {"request_id": name})
    prepared = spec.prepare(PROCESSOR)
    follower = text or PROCESSOR.follow(prepared)
    return ClientRequest(spec, prepared, follower, 0, internal_id=f"{name}-{next(NUMBERS)}")


async def receive(request: ClientRequest) -> RequestOutput:
    return await MailboxReader([request.mailbox]).receive()


class StopsAtOnce(RequestText):
    """Finds a stop string in whatever comes."""

    def __init__(self) -> None: ...

    def append(
        self, new_token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> TextDelta:
        return TextDelta("", "stop", 1)


class Broken(StopsAtOnce):
    """Fails at whatever comes."""

    def append(
        self, new_token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> TextDelta:
        raise OverflowError("no such token")


def outputs_of(request: ClientRequest, finish: FinishReason | None = None) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[EngineCoreOutput(request.internal_id, [1, 2], finish_reason=finish)]
    )


async def test_an_ended_request_is_forgotten_and_needs_no_abort() -> None:
    table, request = RequestTable(), make_request("a")
    table.add(request)
    assert table.apply(outputs_of(request, FinishReason.STOP)) == []
    assert len(table) == 0
    assert not table.discard(request)


async def test_a_left_request_is_forgotten_and_needs_one() -> None:
    table, request = RequestTable(), make_request("a")
    table.add(request)
    assert table.discard(request)
    assert not table.discard(request)
    assert table.apply(outputs_of(request)) == []


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
async def test_a_stop_string_needs_an_abort_unless_the_engine_ended_it_too(
    finish: FinishReason | None,
) -> None:
    table, request = RequestTable(), make_request("a", StopsAtOnce())
    table.add(request)
    assert table.apply(outputs_of(request, finish)) == ([request] if finish is None else [])
    assert len(table) == 0
    output = await receive(request)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "stop")


async def test_one_request_that_cannot_be_read_spares_its_neighbours(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table, bad, good = RequestTable(), make_request("bad", Broken()), make_request("good")
    table.add(bad)
    table.add(good)
    message = EngineCoreOutputs(outputs=[*outputs_of(bad).outputs, *outputs_of(good).outputs])
    with caplog.at_level(logging.ERROR):
        assert table.apply(message) == [bad]
    assert list(table) == [good]
    assert (await receive(good)).token_ids == [1, 2]
    with pytest.raises(RequestFailedError, match="no such token"):
        await receive(bad)


async def test_each_failed_request_has_an_error_of_its_own() -> None:
    table, requests = RequestTable(), [make_request("a"), make_request("a")]
    for request in requests:
        table.add(request)
    table.fail_all(lambda: EngineClosedError("closed"))
    errors = []
    for request in requests:
        with pytest.raises(EngineClosedError) as caught:
            await receive(request)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert len(table) == 0


def open_parent(**params: Any) -> ParentRequest:
    spec = RequestSpec.of([1, 2], SamplingParams(**params), {"request_id": "a"})
    return ParentRequest(spec, spec.prepare(PROCESSOR), PROCESSOR, lambda: 0)


def test_internal_ids_of_one_name_differ() -> None:
    parents = [open_parent() for _ in range(100)]
    assert len({child.internal_id for parent in parents for child in parent.children}) == 100


@pytest.mark.known_fault(kind="shared-draws")
def test_answers_have_ids_and_seeds_of_their_own() -> None:
    """As a vLLM front end sends them."""
    children = open_parent(n=3, seed=42).children
    ids = [child.internal_id for child in children]
    assert [internal_id.split("_")[0] for internal_id in ids] == ["0", "1", "2"]
    assert len({internal_id.partition("_")[2] for internal_id in ids}) == 1
    params = [child.to_message(0).sampling_params for child in children]
    assert [(each.n, each.seed) for each in params if each is not None] == [
        (1, 42),
        (1, 43),
        (1, 44),
    ]


def test_answers_without_a_seed_have_none() -> None:
    params = [child.to_message(0).sampling_params for child in open_parent(n=2).children]
    assert [each.seed for each in params if each is not None] == [None, None]


@pytest.mark.known_fault(kind="shared-draws")
def test_a_seed_that_leaves_no_room_for_the_others_is_refused() -> None:
    with pytest.raises(RequestError, match="seed must be"):
        open_parent(n=2, seed=2**63 - 1)


def test_a_name_is_made_up_where_none_is_given() -> None:
    assert RequestSpec.of([1], None, {}).request_id != RequestSpec.of([1], None, {}).request_id
