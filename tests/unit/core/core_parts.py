"""Requests, cores, results and drivers for the core's tests, all small."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from trio_engine.config import EngineConfig
from trio_engine.core.engine_core import EngineCore
from trio_engine.core.plan import ExecutorProperties, StepPlan, StepResult
from trio_engine.core.request import Request
from trio_engine.executor.kv_checking import KVCheckingExecutor
from trio_engine.requests import EngineCoreRequest
from trio_engine.sampling_params import SamplingParams, StructuredOutputsParams
from trio_engine.testing.core_driver import CoreDriver, RequestLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trio_engine.core.plan import RowGrammar
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


def take(core: EngineCore, client_index: int = 0) -> list[EngineCoreOutput]:
    """All unsent outputs of one client, taken."""
    return [output for message in take_messages(core, client_index) for output in message.outputs]


def take_messages(core: EngineCore, client_index: int = 0) -> list[EngineCoreOutputs]:
    """All unsent messages of one client, taken."""
    return core.outboxes[client_index].take(0.0)


def event_types(output: EngineCoreOutput) -> list[EngineCoreEventType]:
    """The events that an output tells, without their times."""
    return [event.type for event in output.events or ()]


def make_driver(
    *,
    launches_ahead: bool = False,
    num_clients: int = 1,
    pipeline_depth: int = 2,
    compile_grammar: Callable[[StructuredOutputsParams], RowGrammar | str] | None = None,
    **config: Any,
) -> CoreDriver:
    """A core with the executor that checks every block and token, driven move by move."""
    options: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "block_size": 1, "num_blocks": 64}
    engine_config = EngineConfig(executor="kv-checking", **(options | config))
    executor = KVCheckingExecutor(
        engine_config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE
    )
    ticks = count(1)
    core = EngineCore(
        engine_config,
        executor.load(),
        num_clients=num_clients,
        clock=lambda: float(next(ticks)),
    )
    return CoreDriver(
        core, executor, pipeline_depth=pipeline_depth, compile_grammar=compile_grammar
    )


def add(driver: CoreDriver, source: EngineCoreRequest) -> RequestLog:
    """Adds a request to a driver's core; what its client hears is in the log."""
    log = driver.listen(source.client_index, source.request_id)
    driver.core.add(source)
    return log


def solo_tokens(source: EngineCoreRequest) -> list[int]:
    """What a request generates alone in an ample pool, each step awaited."""
    driver = make_driver(pipeline_depth=1)
    log = add(driver, source)
    driver.run_until_idle()
    return log.token_ids
