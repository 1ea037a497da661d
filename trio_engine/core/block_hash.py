"""What a full KV block holds, as a hash: equal hashes mean equal keys and values.

Pure. A block's hash covers its tokens and everything before them, by the hash of the block before
it; the first one's stands on the *root*, which covers what the tokens do not say: the salt, the
adapter, the form of embeddings. ``docs/design/prefix-cache.md`` says why this hash.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from trio_engine.core.request import Request
    from trio_engine.requests import EngineCoreRequest

HASH_BYTES = 32
"""So long that nobody can make two blocks with one hash."""

# Roots are hashed as something else than blocks, or a salt could be chosen to look like a block.
_ROOT_KIND = b"kv-block-root"


def root_hash(source: EngineCoreRequest) -> bytes:
    """What the first block of a request stands on. Equal for requests that may share blocks."""
    lora, embeds = source.lora_request, source.prompt_embeds
    if source.cache_salt is None and lora is None and embeds is None:
        return _PLAIN_ROOT
    # Each thing has its own place: a salt never equals the name of an adapter.
    parts = msgspec.msgpack.encode(
        (
            source.cache_salt,
            None if lora is None else (lora.lora_int_id, lora.lora_name, lora.lora_path),
            None if embeds is None else (embeds.dtype, embeds.shape[1:]),
        )
    )
    return _hash_root(parts)


def _hash_root(parts: bytes) -> bytes:
    return blake2b(parts, digest_size=HASH_BYTES, person=_ROOT_KIND).digest()


_PLAIN_ROOT = _hash_root(b"")


# A copy of it takes half of the time that a new one takes.
_EMPTY = blake2b(digest_size=HASH_BYTES)


class BlockHasher:
    """Hashes the full blocks of requests, each once.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def hashes(self, request: Request, num_blocks: int) -> list[bytes]:
        """The hashes of at least the first ``num_blocks`` blocks, all of whose tokens are known."""
        hashes = request.block_hashes
        if len(hashes) >= num_blocks:
            return hashes
        start, stop = len(hashes) * self._block_size, num_blocks * self._block_size
        assert stop <= len(request.token_ids), f"{request} does not fill its block {num_blocks - 1}"
        data = request.token_ids[start:stop].tobytes()
        num_bytes = self._block_size * request.token_ids.itemsize
        block_hash = hashes[-1] if hashes else request.root_hash
        for at in range(0, len(data), num_bytes):
            hasher = _EMPTY.copy()
            hasher.update(block_hash + data[at : at + num_bytes])
            if request.prompt_embeds is not None:
                hasher.update(self._embeds_content(request, len(hashes) * self._block_size))
            block_hash = hasher.digest()
            hashes.append(block_hash)
        return hashes

    def _embeds_content(self, request: Request, start: int) -> bytes:
        """Which of a block's positions are embeddings, and these; nothing behind the prompt."""
        if start >= request.num_prompt_tokens:
            return b""
        return _embeds_content(request, range(start, start + self._block_size))


def _embeds_content(request: Request, positions: range) -> bytes:
    """Which of the positions are embeddings, and these."""
    embeds, is_token = request.prompt_embeds, request.prompt_is_token_ids
    assert embeds is not None
    row_bytes = embeds.data.nbytes // embeds.shape[0]
    is_embeds = [
        position < request.num_prompt_tokens and not (is_token is not None and is_token[position])
        for position in positions
    ]
    rows = (
        embeds.data[position * row_bytes : (position + 1) * row_bytes]
        for position, is_embedded in zip(positions, is_embeds, strict=True)
        if is_embedded
    )
    return bytes(is_embeds) + b"".join(rows)
