"""The engine-core process of an LLM server, on Trio structured concurrency.

The names below load their modules at first use. That is not for speed alone: this file runs
before the engine process can install its signal handlers, so it must import nothing else.
"""

from __future__ import annotations

import importlib

# Not imported: typing alone takes longer than all else here. Type checkers go by the name.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from trio_engine.client.base import EngineClient as EngineClient
    from trio_engine.client.inproc_client import open_inproc_engine as open_inproc_engine
    from trio_engine.client.launcher import (
        connect_engine as connect_engine,
        open_engine as open_engine,
    )
    from trio_engine.client.outputs import RequestOutput as RequestOutput
    from trio_engine.client.stream import RequestStream as RequestStream
    from trio_engine.config import EngineConfig as EngineConfig
    from trio_engine.errors import (
        ConfigError as ConfigError,
        EngineClosedError as EngineClosedError,
        EngineDeadError as EngineDeadError,
        EngineError as EngineError,
        EngineStartError as EngineStartError,
        ModelError as ModelError,
        OverloadedError as OverloadedError,
        ProtocolError as ProtocolError,
        RequestError as RequestError,
        RequestFailedError as RequestFailedError,
        StepError as StepError,
        UtilityError as UtilityError,
    )
    from trio_engine.outputs import FinishReason as FinishReason
    from trio_engine.sampling_params import (
        RequestOutputKind as RequestOutputKind,
        SamplingParams as SamplingParams,
        StructuredOutputsParams as StructuredOutputsParams,
    )
    from trio_engine.text.embeds_prompt import EmbedsPrompt as EmbedsPrompt

__version__ = "0.1.0"

_HOME_OF = {
    "EngineConfig": "config",
    "ConfigError": "errors",
    "EngineClosedError": "errors",
    "EngineDeadError": "errors",
    "EngineError": "errors",
    "EngineStartError": "errors",
    "ModelError": "errors",
    "OverloadedError": "errors",
    "ProtocolError": "errors",
    "RequestError": "errors",
    "RequestFailedError": "errors",
    "StepError": "errors",
    "UtilityError": "errors",
    "EngineClient": "client.base",
    "open_inproc_engine": "client.inproc_client",
    "connect_engine": "client.launcher",
    "open_engine": "client.launcher",
    "RequestOutput": "client.outputs",
    "RequestStream": "client.stream",
    "FinishReason": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StructuredOutputsParams": "sampling_params",
    "EmbedsPrompt": "text.embeds_prompt",
}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
