"""The stop rules: does a request end with the token that it just got?

Pure. Stop *strings* are the client's work; the order of the rules is vLLM 0.25.1's
(``vllm/v1/core/sched/utils.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.outputs import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.core.request import Request
    from trio_engine.sampling_params import RepetitionDetectionParams

REPETITION_STOP_REASON = "repetition_detected"

StopDecision = tuple[FinishReason, int | str | None]


def check_stop(
    request: Request, token_id: int, *, grammar_ended: bool = False
) -> StopDecision | None:
    """Looks at a request whose newest token is ``token_id``.

    Args:
        request: as it is with the token.
        token_id: the token.
        grammar_ended: nothing may follow it by the request's grammar, which ends the request also
            below ``min_tokens``.

    Returns:
        The finish reason and the stop reason, or None to go on.

    Counterpart: ``check_stop`` there. In vLLM a request below ``min_tokens`` goes on even at
    max_model_len and then never ends; here the length limit always holds.
    """
    num_tokens = len(request.token_ids)
    past_min_tokens = num_tokens - request.num_prompt_tokens >= request.min_tokens
    if past_min_tokens:
        if token_id == request.eos_token_id:
            return FinishReason.STOP, None
        if token_id in request.stop_token_ids:
            return FinishReason.STOP, token_id
    if grammar_ended:
        return FinishReason.STOP, None
    if num_tokens >= request.max_total_tokens:
        return FinishReason.LENGTH, None
    detection = request.repetition_detection
    if past_min_tokens and detection is not None and _repeats(request, detection):
        return FinishReason.REPETITION, REPETITION_STOP_REASON
    return None


def _repeats(request: Request, detection: RepetitionDetectionParams) -> bool:
    if detection.min_count < 2:
        return False
    # Only patterns that the output has room for: the size asked for may be anything.
    largest = min(detection.max_pattern_size, request.num_output_tokens // detection.min_count)
    sizes = range(max(1, detection.min_pattern_size), largest + 1)
    return any(_ends_in_repeats(request.token_ids, size, detection.min_count) for size in sizes)


def _ends_in_repeats(tokens: Sequence[int], pattern_size: int, count: int) -> bool:
    # Nearly always the last token tells, and nothing has been copied.
    if tokens[-1] != tokens[-1 - pattern_size]:
        return False
    tail = tokens[-pattern_size * count :]
    return tail[pattern_size:] == tail[:-pattern_size]
