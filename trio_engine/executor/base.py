"""The executor protocol: what runs the model, seen from the engine.

Pure. All calls come from one thread, the forward thread, in order; construction does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from trio_engine.config import EngineConfig

if TYPE_CHECKING:
    from trio_engine.core.plan import DeviceCommand, ExecutorProperties, StepPlan, StepResult


class Executor(Protocol):
    """Runs plans on a device.

    Counterpart: ``vllm/v1/executor/abstract.py``; there results are futures and rows travel by
    request id, here plans are strictly ordered and rows have slots.

    Attributes:
        launches_ahead: if true, plan N + 1 is launched before N is collected, so that a device
            with a queue of its own never idles. A CPU executor says false: it computes in
            ``launch`` or ``collect`` alike.
    """

    launches_ahead: bool

    def load(self) -> ExecutorProperties:
        """Gets ready to run; called once, first. Heavy imports belong here.

        Raises:
            ModelError: the model is missing, damaged or unsupported.
            ConfigError: an option cannot work with this model or machine.
        """
        ...

    def launch(self, plan: StepPlan) -> None:
        """Starts a plan. At most two plans are launched and not collected.

        Raises:
            RequestStepError: some rows are at fault; no plan from this one on counts, and the
                next plan has ``reset`` set.
            Exception: anything else ends the engine.
        """
        ...

    def collect(self) -> StepResult:
        """Waits for the oldest plan not collected. Raises as ``launch`` does."""
        ...

    def command(self, command: DeviceCommand) -> Any:
        """Does something other than a step. No plan is uncollected meanwhile.

        Three commands are for every executor; each means nothing where it has no effect:

        - ``sleep`` (tags): gives back the memory of each ``SleepTag``, all or none of it. No row
          has blocks; no plan comes before it was woken up.
        - ``wake_up`` (tags): takes it again. What fails stays asleep and may be tried again.
          Weights are what they were; the KV cache is empty.
        - ``execute_dummy_batch`` (): computes a step for nobody.

        Returns:
            A value that msgpack can encode.

        Raises:
            Exception: reported to the caller of the command; the engine goes on.
        """
        ...

    def shutdown(self) -> None:
        """Releases the device; called once, last, also after a failed ``load``."""
        ...


ExecutorFactory = Callable[[EngineConfig], Executor]
"""Makes an executor without loading it: cheap, callable on any thread."""
