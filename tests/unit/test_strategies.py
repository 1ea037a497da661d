"""What the strategies draw is what they say, and failures shrink to short prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import find, given, settings

from trio_engine.testing.strategies import frames, malformed_frames, requests
from trio_engine.wire.codec import RequestDecoder, RequestEncoder, UndecodableRequest

if TYPE_CHECKING:
    from trio_engine.requests import EngineCoreRequest


@given(requests())
def test_a_request_survives_the_wire(request_drawn: EngineCoreRequest) -> None:
    sent = [bytes(frame) for frame in RequestEncoder().encode(request_drawn)]
    assert RequestDecoder().decode(sent) == request_drawn


@given(frames())
def test_frames_decode(sent: list[bytes]) -> None:
    RequestDecoder().decode(sent)


@given(malformed_frames())
def test_malformed_frames_do_not(sent: list[bytes]) -> None:
    with pytest.raises(UndecodableRequest):
        RequestDecoder().decode(sent)


def test_a_request_shrinks_to_one_token_and_default_options() -> None:
    found = find(requests(), lambda _: True, settings=settings(database=None))
    assert (found.prompt_token_ids, found.request_id, found.client_index) == ([0], "a", 0)
    assert found.sampling_params is not None
    assert found.sampling_params.max_tokens == 1
    assert found.sampling_params.stop is None
