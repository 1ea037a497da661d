"""The text side of one request's output: tokens in, text out, an end at a stop string.

Pure. It belongs to whoever reads the request's output stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trio_engine.outputs import FinishReason
from trio_engine.text.detokenizer import IncrementalDetokenizer
from trio_engine.text.stop import StopChecker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.sampling_params import SamplingParams
    from trio_engine.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What new tokens come to.

    Attributes:
        text: new text; empty as long as it may still turn into a stop string or a character.
        finished_by_stop_string: the stop string that ended the output, which the caller then
            aborts at the engine.
        num_tokens_kept: how many of the tokens belong to the output: those behind a stop string
            do not.
    """

    text: str
    finished_by_stop_string: str | None
    num_tokens_kept: int


class RequestText:
    """Follows one request's output. Without a tokenizer, or with ``detokenize`` off, all text
    is empty.

    Args:
        tokenizer: of the model, if there is one.
        prompt_token_ids: as sent to the engine.
        params: as sent to the engine.

    Counterpart: ``BaseIncrementalDetokenizer.update`` in ``vllm/v1/engine/detokenizer.py``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self._includes_stop = params.include_stop_str_in_output
        self._num_output_tokens = 0
        self._finished = False
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
        self._checker: StopChecker | None = None
        if params.stop_strings:
            self._checker = StopChecker(params.stop_strings, self._includes_stop, params.min_tokens)

    def append(
        self, new_token_ids: Sequence[int], finish_reason: FinishReason | None = None
    ) -> TextDelta:
        """Takes the tokens of one or more steps. After the end it keeps nothing more.

        Args:
            new_token_ids: in order; may be empty at the end.
            finish_reason: why the engine ended the output with them. With STOP the last one is
                the stop token, which stays out of the text unless stops are to be included.
        """
        if self._finished:
            return TextDelta("", None, 0)
        self._finished = finish_reason is not None
        if self._detokenizer is None:
            return TextDelta("", None, len(new_token_ids))
        hides_last = finish_reason is FinishReason.STOP and not self._includes_stop
        delta = self._read(self._detokenizer, new_token_ids[: -1 if hides_last else None])
        if delta.finished_by_stop_string is not None:
            self._finished = True
            return delta
        rest = self._rest(self._detokenizer) if self._finished else ""
        return TextDelta(delta.text + rest, None, len(new_token_ids))

    def _read(self, detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> TextDelta:
        if self._checker is None:
            return TextDelta(detokenizer.append(token_ids), None, len(token_ids))
        pieces = []
        for num_kept, token_id in enumerate(token_ids, 1):
            # One by one: min_tokens counts them, and those behind a stop string are dropped.
            self._num_output_tokens += 1
            text = detokenizer.append((token_id,))
            piece, stop = self._checker.append(text, self._num_output_tokens)
            pieces.append(piece)
            if stop is not None:
                return TextDelta("".join(pieces), stop, num_kept)
        return TextDelta("".join(pieces), None, len(token_ids))

    def _rest(self, detokenizer: IncrementalDetokenizer) -> str:
        held = "" if self._checker is None else self._checker.finish()
        return held + detokenizer.finish()
