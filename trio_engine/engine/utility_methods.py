"""The table of utility methods, each with its typed arguments.

Engine. What means nothing to this engine is in the table too: it fails and says why, or gives the
answer that is true of an engine without it. Nothing here pretends to have done something.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trio_engine.core.admission import check_adapter
from trio_engine.engine.sleep import SLEEP_COMMAND, WAKE_UP_COMMAND, SleepCalls
from trio_engine.errors import RequestError, UtilityError
from trio_engine.requests import SERVED_TASK, LoRARequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.engine.step_loop import StepLoop

DUMMY_BATCH_COMMAND = "execute_dummy_batch"


def built_in_methods(loop: StepLoop) -> dict[str, Callable[..., Any]]:
    """All methods that front ends of vLLM 0.25.1 may call, and ``get_statistics``, by name."""
    return {
        "get_supported_tasks": lambda: [SERVED_TASK],
        "get_statistics": lambda: msgspec.to_builtins(loop.statistics()),
        **_pausing(SleepCalls(loop)),
        **_caches(loop),
        **_device(loop),
        **_adapters(loop),
        "profile": _profile,
        "save_sharded_state": _save_sharded_state,
        "reinitialize_distributed": _no_elastic_parallelism,
        "eep_handle_engine_core_notification": _no_elastic_parallelism,
    }


def _pausing(calls: SleepCalls) -> dict[str, Callable[..., Any]]:
    return {
        "pause_scheduler": calls.pause,
        "resume_scheduler": calls.resume,
        # Memory sleeps only under a pause, so both questions have one answer.
        "is_scheduler_paused": calls.is_sleeping,
        "sleep": calls.sleep,
        "wake_up": calls.wake_up,
        "is_sleeping": calls.is_sleeping,
    }


def _caches(loop: StepLoop) -> dict[str, Callable[..., Any]]:
    async def reset_prefix_cache(
        reset_running: bool = False, reset_connector: bool = False
    ) -> bool:
        async with loop.planning_stopped():
            return loop.core.reset_prefix_cache(reset_running=reset_running)

    return {
        "reset_prefix_cache": reset_prefix_cache,
        # There are no multimodal inputs and no encoder, so these caches are always empty.
        "reset_mm_cache": lambda: None,
        "reset_encoder_cache": lambda: None,
    }


def _device(loop: StepLoop) -> dict[str, Callable[..., Any]]:
    async def collective_rpc(
        method: str,
        limit_s: float | None = None,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method in (SLEEP_COMMAND, WAKE_UP_COMMAND):
            # Nothing would be paused, and no request would give up its blocks.
            raise RequestError(f"{method} is a method of the engine: call that")
        if kwargs:
            raise RequestError(f"kwargs must be empty, got {kwargs!r}")
        if limit_s is not None and not limit_s >= 0:  # so that NaN is refused too
            raise RequestError(f"the timeout must be 0 s or more, got {limit_s}")
        with trio.move_on_after(math.inf if limit_s is None else limit_s):
            return [await loop.run_command(method, *(args or ()))]
        raise UtilityError(f"{method} was not done within {limit_s:g} s")

    async def execute_dummy_batch() -> None:
        await loop.run_command(DUMMY_BATCH_COMMAND)

    return {"collective_rpc": collective_rpc, "execute_dummy_batch": execute_dummy_batch}


def _adapters(loop: StepLoop) -> dict[str, Callable[..., Any]]:
    async def add_lora(lora_request: LoRARequest) -> bool:
        check_adapter(lora_request)
        return bool(await change("add_lora", lora_request, replaces=lora_request.load_inplace))

    async def remove_lora(lora_id: int) -> bool:
        if lora_id in loop.core.lora_ids:
            raise RequestError(f"adapter {lora_id} is in use")
        return bool(await change("remove_lora", lora_id, replaces=True))

    async def pin_lora(lora_id: int) -> bool:
        return bool(await loop.run_command("pin_lora", lora_id))

    async def list_loras() -> set[int]:
        return set(await loop.run_command("list_loras"))

    async def change(method: str, argument: Any, *, replaces: bool) -> Any:
        # What was computed with an adapter must not be found once another has its id.
        async with loop.planning_stopped():
            done = await loop.run_command(method, argument)
            if replaces:
                loop.core.reset_prefix_cache(reset_running=True)
            return done

    return {
        "add_lora": add_lora,
        "remove_lora": remove_lora,
        "pin_lora": pin_lora,
        "list_loras": list_loras,
    }


def _profile(start: bool = True, prefix: str | None = None) -> None:
    raise RequestError("this engine has no profiler")


def _save_sharded_state(path: str, pattern: str | None = None, max_size: int | None = None) -> None:
    raise RequestError("this engine has no sharded state: its model runs on one device")


def _no_elastic_parallelism(request: Any = None) -> None:
    raise RequestError("this engine does no elastic expert parallelism")
