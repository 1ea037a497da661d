"""What a caller opened as one request: as many requests to the engine as it wants answers.

Pure but for the reader's wait. Counterpart: ``vllm/v1/engine/parallel_sampling.py``
``ParentRequest``; ids and seeds of the children are the same.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import msgspec

from trio_engine.client.mailbox_reader import MailboxReader
from trio_engine.client.request import ClientRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.client.request import RequestSpec
    from trio_engine.sampling_params import SamplingParams
    from trio_engine.text.processor import PreparedPrompt, TextProcessor


class ParentRequest:
    """``SamplingParams.n`` requests of one prompt, which end one by one.

    Args:
        spec: what the caller asked for.
        prepared: what is sent of it.
        text: of the engine's model; each answer is followed by itself.
        pick_engine: the engine for the next child.

    Attributes:
        children: one for each answer. Alone it bears the parent's id, else ``<index>_<id>``. The
            id ends in eight random hex digits, so that a late ABORT can never hit the next
            request of the same name.
        reader: of what they answer.

    Raises:
        RequestError: a child's seed, ``seed + index``, is out of range.
    """

    def __init__(
        self,
        spec: RequestSpec,
        prepared: PreparedPrompt,
        text: TextProcessor,
        pick_engine: Callable[[], int],
    ) -> None:
        internal_id = f"{spec.request_id}-{secrets.token_hex(4)}"
        num_answers = spec.params.n
        self.children = [
            ClientRequest(
                spec,
                prepared._replace(params=_child_params(prepared.params, index)),
                text.follow(prepared),
                pick_engine(),
                internal_id=internal_id if num_answers == 1 else f"{index}_{internal_id}",
                index=index,
            )
            for index in range(num_answers)
        ]
        self.reader = MailboxReader([child.mailbox for child in self.children])


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """One answer's; seeded answers must differ, and be the same the next time."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else params.seed + index
    return msgspec.structs.replace(params, n=1, seed=seed)
