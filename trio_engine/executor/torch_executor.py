"""The executor that runs the embedded torch model.

Layer: executor. Imported on the main thread, so it imports no torch: that is left to ``load``, on
the forward thread, when signals are already handled.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from trio_engine.errors import RequestError, StepError
from trio_engine.executor.openmp import short_spins

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, ExecutorProperties, StepPlan, StepResult
    from trio_engine.model.in_flight import StepInFlight
    from trio_engine.model.runner import ModelRunner


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
        self._in_flight: deque[StepInFlight] = deque()

    def load(self) -> ExecutorProperties:
        """Imports torch, loads the weights and makes the KV cache.

        Raises:
            ModelError: the model is missing, damaged or unsupported.
            ConfigError: an option cannot work with this model or machine, or memory ran out.
        """
        with short_spins():
            from trio_engine.model.load import load_model

        self._runner, properties = load_model(self._config, self._on_progress)
        self.launches_ahead = self._runner.launches_ahead
        return properties

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan.

        Raises:
            RequestStepError: a new row has token ids outside the vocabulary.
            StepError: it contradicts the rows, memory ran out, or there is no model.
        """
        if plan.reset:
            self._in_flight.clear()
        self._in_flight.append(self._loaded().launch(plan))

    def collect(self) -> StepResult:
        """Waits for the oldest plan.

        Raises:
            StepError: none is in flight.
        """
        if not self._in_flight:
            raise StepError("no plan is in flight")
        return self._in_flight.popleft().settle()

    def command(self, command: DeviceCommand) -> Any:
        """Does something other than a step. ``synchronize`` () waits for the device.

        Raises:
            RequestError: the executor has no such command.
        """
        if command.method != "synchronize":
            raise RequestError(f"the torch executor has no command {command.method!r}")
        self._loaded().synchronize()

    def shutdown(self) -> None:
        """Lets go of the model and the cache."""
        self._in_flight.clear()
        self._runner = None

    def _loaded(self) -> ModelRunner:
        if self._runner is None:
            raise StepError("the executor holds no model: not loaded, or shut down")
        return self._runner
