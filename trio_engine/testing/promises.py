"""What clients may expect of an engine, as plain facts beside a running one.

Public kit, pure. A test notes what it asks for and hands over every message that a client gets;
each ``check_...`` holds one promise of ``docs/testing.md`` against that. Nothing here looks into
the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trio_engine.outputs import FinishReason
from trio_engine.requests import EngineCoreRequest
from trio_engine.testing.core_driver import RequestLog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trio_engine.outputs import EngineCoreOutput, EngineCoreOutputs


class Life(msgspec.Struct, eq=False):
    """One life of a request id.

    Attributes:
        request: what was asked.
        solo: what its client would hear if nobody else were there.
        log: what its client heard.
        is_aborted: the engine has taken its client's ABORT while it lived: no output may follow.
        awaits_abort: the ABORT is on its way: outputs may follow until it is told as finished.
        may_abort: the engine was told to end it, as by a pause or a shutdown.
        may_fail: the engine may end it with ERROR, though alone it would not.
        is_told: its id came among ``finished_requests``.
    """

    request: EngineCoreRequest
    solo: RequestLog
    log: RequestLog = msgspec.field(default_factory=RequestLog)
    is_aborted: bool = False
    awaits_abort: bool = False
    may_abort: bool = False
    may_fail: bool = False
    is_told: bool = False

    @property
    def key(self) -> tuple[int, str]:
        """Whose it is, and under which id."""
        return self.request.client_index, self.request.request_id

    @property
    def is_over(self) -> bool:
        """Whether it has had its terminal event."""
        return self.is_aborted or self.log.finish_reason is not None

    @property
    def stop_reason(self) -> int | str | None:
        """What was said about its end."""
        return self.log.outputs[-1].stop_reason if self.log.outputs else None


class Promises:
    """The lives of all requests, and what does not fit any.

    Outputs under one id belong to its oldest life that is not over, as an engine tells lives in
    their order.

    Args:
        run_alone: the oracle for a request's tokens.

    Attributes:
        lives: oldest first.
        strays: outputs and ends, in words, that belong to no life.
    """

    def __init__(self, run_alone: Callable[[EngineCoreRequest], RequestLog]) -> None:
        self.lives: list[Life] = []
        self.strays: list[str] = []
        self._run_alone = run_alone

    # What is asked and heard

    def begin(self, request: EngineCoreRequest, *, solo: RequestLog | None = None) -> Life:
        """A life begins; call it before the engine can have heard of the request.

        ``solo`` is what is to come of it, where the oracle does not know.
        """
        life = Life(request, self._run_alone(request) if solo is None else solo)
        self.lives.append(life)
        return life

    def open_lives(self, client_index: int | None = None) -> list[Life]:
        """Those that are not over, of one client or all, oldest first."""
        return [
            life
            for life in self.lives
            if not life.is_over and client_index in (None, life.request.client_index)
        ]

    def find(self, client_index: int, request_id: str) -> Life | None:
        """The oldest life under an id that is not over."""
        key = (client_index, request_id)
        return next((life for life in self.open_lives(client_index) if life.key == key), None)

    def hear(self, client_index: int, message: EngineCoreOutputs) -> None:
        """A client gets a message."""
        told = message.finished_requests or set()
        for output in message.outputs:
            self._hear_output(client_index, output, told)
        for request_id in sorted(told):
            self._hear_finished(client_index, request_id)

    # The promises

    def check_no_output_after_a_terminal_event(self) -> None:
        """What comes belongs to a request that is not over."""
        assert not self.strays, self.strays

    def check_tokens_equal_a_solo_run(self) -> None:
        """Neither neighbours nor preemption, failure, pause or chunking change a token."""
        for life in self.lives:
            heard, solo = life.log, life.solo
            assert heard.token_ids == solo.token_ids[: len(heard.token_ids)], life.request
            if _is_own_end(heard.finish_reason) or heard.finish_reason is solo.finish_reason:
                assert heard.token_ids == solo.token_ids, life.request
                assert heard.finish_reason is solo.finish_reason, life.request
                assert life.stop_reason == solo.outputs[-1].stop_reason, life.request

    def check_logprobs_equal_a_solo_run(self) -> None:
        """A row with each token and those of the prompt with the first, for those who asked."""
        for life in self.lives:
            params, heard = life.request.sampling_params, life.log
            assert params is not None
            rows, prompts = _logprobs_of(heard)
            solo_rows, solo_prompts = _logprobs_of(life.solo)
            num_rows = 0 if params.num_logprobs is None else len(heard.token_ids)
            assert rows == solo_rows[:num_rows], life.request
            has_prompts = params.prompt_logprobs is not None and heard.token_ids
            assert prompts == (solo_prompts if has_prompts else []), life.request

    def check_limits_are_kept(self) -> None:
        """Said apart from the oracle, which might break the same limit."""
        for life in self.lives:
            params, num_tokens = life.request.sampling_params, len(life.log.token_ids)
            assert params is not None
            assert params.max_tokens is None or num_tokens <= params.max_tokens, life.request
            if life.log.finish_reason is FinishReason.STOP:
                assert num_tokens >= params.min_tokens, life.request

    def check_what_was_cached_was_there(self) -> None:
        """Some request with the same salt and adapter begins with it; never the last token."""
        for life in self.lives:
            stats = next((out.prefill_stats for out in life.log.outputs if out.prefill_stats), None)
            if stats is not None and stats.num_cached_tokens:
                prompt = life.request.prompt_token_ids or []
                assert stats.num_cached_tokens < len(prompt), life.request
                cached = prompt[: stats.num_cached_tokens]
                others = [other for other in self.lives if _may_share(life, other)]
                assert any(_begins_with(other, cached) for other in others), life.request

    def check_every_end_has_a_cause(self) -> None:
        """ABORT and ERROR come only to those who were told to expect it."""
        for life in self.lives:
            reason = life.log.finish_reason
            if reason is FinishReason.ABORT:
                assert life.may_abort, life.request
            elif reason is FinishReason.ERROR and reason is not life.solo.finish_reason:
                assert life.may_fail, life.request

    def check_every_life_is_over(self, client_index: int | None = None) -> None:
        """At the end, for one client or all: one terminal event each, also told as finished."""
        for life in self.lives:
            if client_index not in (None, life.request.client_index):
                continue
            assert life.is_over, f"no end: {life.request}"
            assert life.is_told, f"not among finished_requests: {life.request}"

    # Inside

    def _hear_output(self, client_index: int, output: EngineCoreOutput, told: set[str]) -> None:
        life = self.find(client_index, output.request_id)
        if life is None:
            self.strays.append(f"client {client_index} got {output}")
            return
        life.log.outputs.append(output)
        life.log.token_ids.extend(output.new_token_ids)
        life.log.finish_reason = output.finish_reason
        if output.finish_reason is not None and output.request_id not in told:
            self.strays.append(f"client {client_index} got {output} without its id as finished")

    def _hear_finished(self, client_index: int, request_id: str) -> None:
        key = (client_index, request_id)
        untold = [life for life in self.lives if life.key == key and not life.is_told]
        for life in untold:
            life.is_aborted = life.is_aborted or (life.awaits_abort and not life.is_over)
            life.is_told = life.is_over
        if not any(life.is_told for life in untold):
            self.strays.append(f"client {client_index} was told {request_id!r} as finished")


def excuse_aborts(lives: Iterable[Life]) -> None:
    """The engine was told to end these."""
    for life in lives:
        life.may_abort = True


def excuse_failures(lives: Iterable[Life]) -> None:
    """The engine may not be able to serve these to their end."""
    for life in lives:
        life.may_fail = True


def _may_share(life: Life, other: Life) -> bool:
    first, second = life.request, other.request
    same_source = (first.cache_salt, first.lora_request) == (second.cache_salt, second.lora_request)
    return life is not other and same_source


def _begins_with(life: Life, token_ids: list[int]) -> bool:
    """Whether it may have had these tokens: what it got before an abort nobody heard."""
    text = [*(life.request.prompt_token_ids or []), *life.solo.token_ids]
    return text[: len(token_ids)] == token_ids


def _logprobs_of(log: RequestLog) -> tuple[list[list[int]], list[object]]:
    """Rows of ids; and what came of the prompt, each with how many tokens came before it."""
    rows: list[list[int]] = []
    prompts: list[object] = []
    num_tokens = 0
    for output in log.outputs:
        if output.new_logprobs is not None:
            new_rows: list[list[int]] = output.new_logprobs.logprob_token_ids.tolist()
            assert len(new_rows) == len(output.new_token_ids), output
            rows += new_rows
        if output.new_prompt_logprobs_tensors is not None:
            prompts.append((num_tokens, output.new_prompt_logprobs_tensors))
        num_tokens += len(output.new_token_ids)
    return rows, prompts


def _is_own_end(reason: FinishReason | None) -> bool:
    return reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
