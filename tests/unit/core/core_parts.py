"""Requests, cores and results for the core's tests: small numbers, no executor needed."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.core.plan import NO_TOKEN, ExecutorProperties, StepPlan, StepResult
from trio_engine.core.request import Request
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio_engine.outputs import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs

VOCAB_SIZE = 512
MAX_MODEL_LEN = 64


def make_source(
    request_id: str = "r",
    prompt: Sequence[int] | int = 3,
    *,
    client_index: int = 0,
    source_fields: dict[str, Any] | None = None,
    **sampling: Any,
) -> EngineCoreRequest:
    """A request as a client sends it; ``prompt`` may be a length."""
    request = EngineCoreRequest(
        request_id,
        list(range(prompt)) if isinstance(prompt, int) else list(prompt),
        None,
        SamplingParams(**sampling),
        None,
        0.0,
        None,
        None,
        None,
        client_index=client_index,
    )
    for name, value in (source_fields or {}).items():
        setattr(request, name, value)
    return request


def make_request(
    request_id: str = "r",
    prompt: Sequence[int] | int = 3,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> Request:
    """A request as admitted."""
    source = make_source(request_id, prompt, **options)
    assert source.sampling_params is not None
    return Request(source, source.sampling_params, max_model_len)


def make_properties(**changes: Any) -> ExecutorProperties:
    """Of an executor with one-token blocks, so that a token is a block."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": 1,
        "num_blocks": 64,
    }
    return ExecutorProperties(**(values | changes))


def make_core(
    *,
    num_clients: int = 1,
    num_blocks: int = 64,
    block_size: int = 1,
    engine_index: int = 0,
    **config: Any,
) -> EngineCore:
    """A core whose clock counts its calls."""
    ticks = count(1)
    return EngineCore(
        EngineConfig(**config),
        make_properties(num_blocks=num_blocks, block_size=block_size),
        num_clients=num_clients,
        clock=lambda: float(next(ticks)),
        engine_index=engine_index,
    )


def plan_step(core: EngineCore) -> StepPlan:
    """The next plan, of which the test is sure."""
    plan = core.schedule()
    core.check_integrity()
    assert plan is not None
    return plan


def settle(core: EngineCore, plan: StepPlan, *token_ids: int) -> None:
    """Hands in a plan's result, made by hand."""
    core.update(StepResult(plan_id=plan.plan_id, token_ids=list(token_ids)))
    core.check_integrity()


def run_step(core: EngineCore, *token_ids: int) -> StepPlan:
    """Plans a step and settles it at once."""
    plan = plan_step(core)
    settle(core, plan, *token_ids)
    return plan


def run_to_end(core: EngineCore, token_id: int = 100) -> None:
    """Steps until nothing can run; each sampling row draws ``token_id``."""
    known = _known_lengths(core)
    for _ in range(1000):
        plan = core.schedule()
        if plan is None:
            return
        known.update({row.slot: len(row.token_ids) - row.num_computed_tokens for row in plan.new_rows})
        tokens = []
        for slot, num_tokens in zip(plan.slots, plan.num_scheduled_tokens, strict=True):
            known[slot] -= num_tokens
            tokens.append(token_id if known[slot] == 0 else NO_TOKEN)
            known[slot] += known[slot] == 0
        settle(core, plan, *tokens)
    raise AssertionError("1000 steps and no end")
