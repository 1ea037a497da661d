"""What a prompt is made of: token ids, embeddings, or both side by side.

Pure. Where an embedding stands there is no token; its place in lists of ids holds ``NO_ID``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trio_engine.errors import RequestError

if TYPE_CHECKING:
    from trio_engine.requests import EngineCoreRequest
    from trio_engine.tensors import TensorData

NO_ID = 0
EMBEDS_DTYPES = ("float32", "bfloat16", "float16")


def prompt_token_ids(source: EngineCoreRequest) -> list[int]:
    """The prompt's ids, one for each position; the request's own list where it has one."""
    embeds, is_token = source.prompt_embeds, source.prompt_is_token_ids
    ids = source.prompt_token_ids or []
    if embeds is None:
        return ids
    if is_token is None:
        return [NO_ID] * embeds.shape[0]
    return [id_ if is_id else NO_ID for id_, is_id in zip(ids, is_token, strict=True)]


def check_prompt(
    source: EngineCoreRequest, *, vocab_size: int, max_model_len: int, hidden_size: int | None
) -> None:
    """Refuses a prompt that can never be served.

    Args:
        source: the request.
        vocab_size: ids run from 0 to ``vocab_size - 1``.
        max_model_len: prompt and output tokens of one request.
        hidden_size: of an embedding; None if none are taken.

    Raises:
        RequestError: names the field and the value.
    """
    embeds, is_token = source.prompt_embeds, source.prompt_is_token_ids
    if embeds is not None:
        _check_embeds(embeds, hidden_size)
        _check_parts(source, embeds.shape[0])
    elif is_token is not None:
        raise RequestError("prompt_is_token_ids without prompt_embeds")
    elif not source.prompt_token_ids:
        raise RequestError("prompt_token_ids is empty")
    ids = prompt_token_ids(source)
    if len(ids) >= max_model_len:
        raise RequestError(
            f"prompt of {len(ids)} tokens does not leave room for an output token:"
            f" max_model_len is {max_model_len}"
        )
    check_ids("prompt_token_ids", min(ids), max(ids), vocab_size)


def check_ids(field: str, low: int, high: int, vocab_size: int) -> None:
    """Refuses ids outside the vocabulary, by the smallest and the largest of them.

    Raises:
        RequestError: names the field and the id.
    """
    if low < 0 or high >= vocab_size:
        worst = low if low < 0 else high
        raise RequestError(f"{field} holds {worst}: ids run from 0 to {vocab_size - 1}")


def _check_embeds(embeds: TensorData, hidden_size: int | None) -> None:
    if hidden_size is None:
        raise RequestError("prompt_embeds is not supported by this engine")
    if embeds.dtype not in EMBEDS_DTYPES:
        raise RequestError(f"prompt_embeds is of {embeds.dtype}, not {', '.join(EMBEDS_DTYPES)}")
    if len(embeds.shape) != 2 or embeds.shape[1] != hidden_size:
        raise RequestError(
            f"prompt_embeds has shape {list(embeds.shape)}, not [tokens, {hidden_size}]"
        )
    if not embeds.shape[0]:
        raise RequestError("prompt_embeds is empty")


def _check_parts(source: EngineCoreRequest, num_embeds: int) -> None:
    """Ids beside embeddings are as many, and a third list says which of the two counts."""
    lists = (source.prompt_token_ids, source.prompt_is_token_ids)
    if lists == (None, None):
        return
    sizes = tuple(None if values is None else len(values) for values in lists)
    if sizes != (num_embeds, num_embeds):
        raise RequestError(
            f"prompt_embeds of {num_embeds} tokens beside prompt_token_ids of {sizes[0]} and"
            f" prompt_is_token_ids of {sizes[1]}"
        )
