"""What a client hands to its caller of one request.

Pure. The wire's own structs are in ``trio_engine.outputs``.
"""

from __future__ import annotations

import msgspec

from trio_engine.outputs import FinishReason, LogprobsLists, LogprobsTensors


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One item of a stream, or the whole answer of ``complete``.

    ``text``, ``token_ids`` and ``logprobs`` hold what ``SamplingParams.output_kind`` asks for:
    what is new since the item before (DELTA), or everything so far (CUMULATIVE, FINAL_ONLY).
    Counterpart: ``vllm/outputs.py``, where a list of completions nests in each output.

    Attributes:
        request_id: the caller's, or the one made up for it.
        index: which of ``SamplingParams.n`` answers this is about, from 0; each has an end.
        text: empty without a tokenizer or with ``detokenize`` off. Holds back what may still turn
            out to be a stop string.
        token_ids: output tokens. The token that stopped the request is the last of them.
        logprobs: a row for each of ``token_ids``, if asked for.
        prompt_logprobs: row i is about prompt token i + 1, if asked for; in every item from the
            first on (DELTA: in the first only).
        finish_reason: None means more to come.
        stop_reason: the stop string or stop token id, or what else the engine said.
        num_prompt_tokens: length of the prompt.
        num_output_tokens: output tokens so far, of this item and all before it.
        num_cached_tokens: prompt tokens read from the prefix cache; None if the engine does not
            say.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsTensors | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the answer's last item."""
        return self.finish_reason is not None
