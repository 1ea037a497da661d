"""The executor that runs the embedded torch model.

Layer: executor. Imported on the main thread, so it imports no torch: that is left to ``load``, on
the forward thread, when signals are already handled.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from trio_engine.errors import ModelError, RequestError, StepError
from trio_engine.executor.adapters import Adapters
from trio_engine.executor.openmp import short_spins
from trio_engine.executor.preload import preload_torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, ExecutorProperties, StepPlan, StepResult
    from trio_engine.model.in_flight import StepInFlight
    from trio_engine.model.load import LoadedModel
    from trio_engine.model.runner import ModelRunner
    from trio_engine.model.sleep import ModelMemory
    from trio_engine.requests import LoRARequest


class TorchExecutor:
    """Runs plans with torch, on CPU or one CUDA device.

    On CPU torch uses as many threads as it thinks right, normally one per core; the environment
    variable ``OMP_NUM_THREADS`` says otherwise. Waiting threads spin only briefly, unless
    ``OMP_WAIT_POLICY`` or ``GOMP_SPINCOUNT`` says otherwise or torch was imported before ``load``.

    Counterpart: ``vllm/v1/executor/uniproc_executor.py``.

    Args:
        config: options of the engine. Nothing is looked at before ``load``.
        on_progress: called during ``load``, on its thread, with the checkpoint's loaded and total
            bytes; first with 0.

    Attributes:
        launches_ahead: known after ``load``: true on CUDA, false on CPU, which computes in
            ``launch``.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.launches_ahead = False
        self._config = config
        self._on_progress = on_progress
        self._runner: ModelRunner | None = None
        self._memory: ModelMemory | None = None
        self._adapters = Adapters(
            config.max_loras if config.enable_lora else 0, self._load_adapter, self._unload_adapter
        )
        self._in_flight: deque[StepInFlight] = deque()

    def load(self) -> ExecutorProperties:
        """Imports torch, loads the weights and makes the KV cache.

        Raises:
            ModelError: the model is missing, damaged or unsupported, or torch is not installed.
            ConfigError: an option cannot work with this model or machine, or memory ran out.
        """
        with short_spins():
            preload_torch()
            load_model = _import_model()

        loaded = load_model(self._config, self._on_progress)
        self._runner, properties, self._memory = loaded
        self.launches_ahead = self._runner.launches_ahead
        return properties

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan.

        Raises:
            RequestStepError: a new row has token ids outside the vocabulary, or an adapter that
                cannot be loaded.
            StepError: it contradicts the rows, memory ran out or sleeps, or there is no model.
        """
        if plan.reset:
            self._in_flight.clear()
        runner, memory = self._loaded()
        if memory.asleep:
            raise StepError(
                f"plan {plan.plan_id}, but memory sleeps: {', '.join(sorted(memory.asleep))}"
            )
        self._adapters.apply(plan)
        self._in_flight.append(runner.launch(plan))

    def collect(self) -> StepResult:
        """Waits for the oldest plan.

        Raises:
            StepError: none is in flight.
        """
        if not self._in_flight:
            raise StepError("no plan is in flight")
        return self._in_flight.popleft().settle()

    def command(self, command: DeviceCommand) -> Any:
        """Does something other than a step.

        What every executor knows, and ``synchronize`` () waits for the device.

        Raises:
            RequestError: the executor has no such command, or it needs memory that sleeps.
            ModelError: the weights cannot be read again, or an adapter cannot be read.
            UtilityError: there is too little memory to wake up, or for an adapter.
        """
        runner, memory = self._loaded()
        if self._adapters.can_do(command):
            return self._adapters.do(command)
        if command.method == "sleep":
            runner.forget_graphs()
            memory.release(*command.args)
        elif command.method == "wake_up":
            memory.restore(*command.args)
        elif command.method == "synchronize":
            runner.synchronize()
        elif command.method != "execute_dummy_batch":
            raise RequestError(f"the torch executor has no command {command.method!r}")
        elif memory.asleep:
            raise RequestError(f"memory sleeps: {', '.join(sorted(memory.asleep))}")
        else:
            runner.run_dummy_batch()
        return None

    def shutdown(self) -> None:
        """Lets go of the model and the cache."""
        self._in_flight.clear()
        self._runner = self._memory = None

    def _load_adapter(self, request: LoRARequest) -> None:
        runner, _ = self._loaded()
        runner.load_adapter(request, max_rank=self._config.max_lora_rank)

    def _unload_adapter(self, lora_id: int) -> None:
        runner, _ = self._loaded()
        runner.adapters.remove(lora_id)

    def _loaded(self) -> tuple[ModelRunner, ModelMemory]:
        if self._runner is None or self._memory is None:
            raise StepError("the executor holds no model: not loaded, or shut down")
        return self._runner, self._memory


def _import_model() -> Callable[..., LoadedModel]:
    try:
        from trio_engine.model.load import load_model
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed: pip install 'trio-engine[torch]'"
        raise ModelError(why) from error
    return load_model
