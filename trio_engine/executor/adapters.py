"""Which adapters an executor holds: a bounded number, the least recently used goes first.

Layer: executor, pure. An adapter is loaded by the plan that brings its first row, as in the
reference, or beforehand by a command. Counterpart: ``vllm/lora/worker_manager.py``
``LRUCacheWorkerLoRAManager``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from trio_engine.errors import EngineError, RequestError, RequestStepError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio_engine.core.plan import DeviceCommand, StepPlan
    from trio_engine.requests import LoRARequest


class Adapters:
    """The adapters of one executor, and the rows that use them.

    Args:
        max_loras: how many are held at once; 0 serves none.
        load: brings an adapter in, in place of one of the same id.
        unload: lets go of the adapter of an id.
    """

    def __init__(
        self,
        max_loras: int,
        load: Callable[[LoRARequest], object],
        unload: Callable[[int], object],
    ) -> None:
        self._max_loras = max_loras
        self._load = load
        self._unload = unload
        # The most recently used is last.
        self._held: OrderedDict[int, LoRARequest] = OrderedDict()
        self._pinned: set[int] = set()
        self._id_by_slot: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        """Loads what a plan's new rows need. Call it before the rows are set up.

        Raises:
            RequestStepError: a row's adapter is not to be had; names the reason.
        """
        for slot in list(self._id_by_slot) if plan.reset else plan.finished_slots:
            self._id_by_slot.pop(slot, None)
        rows = [row for row in plan.new_rows if row.lora_request is not None]
        # All at once, before the first is loaded: the rows of one plan need theirs together.
        self._id_by_slot.update((row.slot, row.lora_id) for row in rows)
        for row in rows:
            assert row.lora_request is not None
            try:
                self._bring_in(row.lora_request)
            except EngineError as error:
                raise RequestStepError(
                    f"adapter {row.lora_request.lora_name!r}: {error}", slots=[row.slot]
                ) from error

    def can_do(self, command: DeviceCommand) -> bool:
        """Whether a command is about adapters."""
        return command.method in ("add_lora", "remove_lora", "pin_lora", "list_loras")

    def do(self, command: DeviceCommand) -> Any:
        """Carries out a command.

        - ``add_lora`` (request) -> True: loads it, again if it is held and ``load_inplace``.
        - ``remove_lora`` (id) -> bool: whether it was held. No row of it runs again.
        - ``pin_lora`` (id) -> True: it stays until it is removed.
        - ``list_loras`` () -> ids.

        Raises:
            RequestError: there is no place, or no such adapter.
            ModelError: the adapter is missing, damaged or for another model.
        """
        if command.method == "list_loras":
            return sorted(self._held)
        (argument,) = command.args
        if command.method == "add_lora":
            return self._add(argument)
        return self._remove(argument) if command.method == "remove_lora" else self._pin(argument)

    def _add(self, request: LoRARequest) -> bool:
        if request.lora_int_id in self._held and request.load_inplace:
            self._load(request)
            self._held[request.lora_int_id] = request
        else:
            self._bring_in(request)
        return True

    def _remove(self, lora_id: int) -> bool:
        # Rows of it may still be here: the core has ended them, and the next plan says so.
        self._pinned.discard(lora_id)
        if self._held.pop(lora_id, None) is None:
            return False
        self._unload(lora_id)
        return True

    def _pin(self, lora_id: int) -> bool:
        if lora_id not in self._held:
            raise RequestError(f"adapter {lora_id} is not here")
        self._pinned.add(lora_id)
        return True

    def _bring_in(self, request: LoRARequest) -> None:
        held = self._held.get(request.lora_int_id)
        if held is None:
            self._make_room()
            self._load(request)
            self._held[request.lora_int_id] = request
        elif held.lora_path != request.lora_path:
            raise RequestError(
                f"id {held.lora_int_id} is that of adapter {held.lora_name!r} in {held.lora_path}"
            )
        self._held.move_to_end(request.lora_int_id)

    def _make_room(self) -> None:
        if not self._max_loras:
            raise RequestError("this engine serves no adapters (enable_lora is off)")
        in_use = {*self._id_by_slot.values(), *self._pinned}
        while len(self._held) >= self._max_loras:
            oldest = next((lora_id for lora_id in self._held if lora_id not in in_use), None)
            if oldest is None:
                raise RequestError(f"all {self._max_loras} places (max_loras) are in use or pinned")
            del self._held[oldest]
            self._unload(oldest)
