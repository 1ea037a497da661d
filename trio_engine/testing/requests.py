"""Requests in short form, and the oracle of most tests: what a request generates alone.

Public kit, pure but for the executor. Imports neither torch nor zmq nor pytest.
"""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams
from trio_engine.testing.core_driver import CoreDriver

if TYPE_CHECKING:
    from trio_engine.executor.base import Executor
    from trio_engine.testing.core_driver import RequestLog


def make_request(
    request_id: str,
    prompt_token_ids: list[int],
    *,
    client: int = 0,
    priority: int = 0,
    cache_salt: str | None = None,
    **params: Any,
) -> EngineCoreRequest:
    """A request as a front end settles it: greedy unless ``params`` say otherwise."""
    return EngineCoreRequest(
        request_id,
        prompt_token_ids,
        None,
        SamplingParams(**{"temperature": 0.0, "max_tokens": 16, **params}),
        None,
        time.time(),
        None,
        cache_salt,
        None,
        client_index=client,
        priority=priority,
    )


def make_core(config: EngineConfig, executor: Executor, *, num_clients: int = 1) -> EngineCore:
    """A core for an executor, which is loaded here. Its clock counts its calls."""
    ticks = count()
    return EngineCore(
        config, executor.load(), num_clients=num_clients, clock=lambda: float(next(ticks))
    )


def run_alone(
    request: EngineCoreRequest, *, max_model_len: int, vocab_size: int | None = None
) -> RequestLog:
    """What a request's client hears if nobody else is there.

    The KV-checking executor runs it in an ample pool and awaits each step. A request that can
    never be served gets its ERROR here too.

    Args:
        request: what it asks; of any client.
        max_model_len: of the engine that it is compared with.
        vocab_size: of that engine's KV-checking executor.
    """
    config = EngineConfig(
        executor="kv-checking",
        max_model_len=max_model_len,
        max_num_seqs=1,
        enable_lora=request.lora_request is not None,
    )
    executor = KVCheckingExecutor(config, vocab_size=vocab_size)
    core = make_core(config, executor, num_clients=request.client_index + 1)
    driver = CoreDriver(core, executor, pipeline_depth=1)
    log = driver.listen(request.client_index, request.request_id)
    driver.core.add(request)
    driver.run_until_idle()
    return log
