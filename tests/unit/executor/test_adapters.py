"""Which adapters an executor holds, loads and lets go."""

from __future__ import annotations

from typing import Any

import pytest

from trio_engine.core.plan import DeviceCommand, NewRow, StepPlan
from trio_engine.errors import ModelError, RequestError, RequestStepError
from trio_engine.executor.adapters import Adapters
from trio_engine.requests import LoRARequest
from trio_engine.sampling_params import SamplingParams


class Shelf:
    """Notes what is loaded; some folders are damaged."""

    def __init__(self, max_loras: int = 2) -> None:
        self.loaded: list[int] = []
        self.num_loads = 0
        self.adapters = Adapters(max_loras, self._load, self.loaded.remove)
        self._plan_id = 0

    def _load(self, request: LoRARequest) -> None:
        if request.lora_path == "/damaged":
            raise ModelError("/damaged: is damaged")
        self.num_loads += 1
        if request.lora_int_id not in self.loaded:
            self.loaded.append(request.lora_int_id)

    def run(self, new: dict[int, LoRARequest], finished: tuple[int, ...] = (), **more: Any) -> None:
        """A plan with these new rows, by slot."""
        rows = [
            NewRow(
                slot=slot,
                request_id=f"r{slot}",
                token_ids=[1],
                num_prompt_tokens=1,
                num_computed_tokens=0,
                block_ids=[slot],
                sampling_params=SamplingParams(),
                lora_request=request,
            )
            for slot, request in new.items()
        ]
        self.adapters.apply(
            StepPlan(
                plan_id=0,
                slots=list(new),
                num_scheduled_tokens=[1] * len(new),
                new_rows=rows,
                finished_slots=list(finished),
                **more,
            )
        )

    def do(self, method: str, *args: Any) -> Any:
        command = DeviceCommand(command_id=0, method=method, args=args)
        assert self.adapters.can_do(command)
        return self.adapters.do(command)


def adapter(lora_id: int, path: str | None = None, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest(f"a{lora_id}", lora_id, path or f"/{lora_id}", load_inplace=load_inplace)


def test_a_row_brings_its_adapter_once() -> None:
    shelf = Shelf()
    shelf.run({0: adapter(1), 1: adapter(1)})
    shelf.run({2: adapter(1), 3: adapter(2)})
    assert shelf.loaded == [1, 2]
    assert shelf.num_loads == 2


def test_the_least_recently_used_goes_and_none_that_a_row_uses() -> None:
    shelf = Shelf()
    shelf.run({0: adapter(1)})
    shelf.run({1: adapter(2)})
    shelf.run({0: adapter(3)}, finished=(0,))
    assert shelf.loaded == [2, 3]
    with pytest.raises(RequestStepError, match="'a4': all 2 places") as caught:
        shelf.run({2: adapter(4)})
    assert caught.value.slots == (2,)
    shelf.run({2: adapter(4)}, reset=True)
    assert shelf.loaded == [3, 4]


def test_using_an_adapter_again_keeps_it() -> None:
    shelf = Shelf()
    shelf.run({0: adapter(1)})
    shelf.run({1: adapter(2)})
    shelf.run({0: adapter(1)}, finished=(0, 1))
    shelf.run({1: adapter(3)}, finished=(0,))
    assert shelf.loaded == [1, 3]


def test_an_adapter_that_cannot_be_loaded_is_its_own_rows_fault() -> None:
    shelf = Shelf()
    with pytest.raises(RequestStepError, match="'a1': /damaged: is damaged") as caught:
        shelf.run({0: adapter(2), 1: adapter(1, "/damaged")})
    assert caught.value.slots == (1,)
    with pytest.raises(RequestStepError, match="id 2 is that of adapter 'a2' in /2"):
        shelf.run({1: adapter(2, "/elsewhere")}, reset=True)


def test_commands_add_list_pin_and_remove() -> None:
    shelf = Shelf()
    assert shelf.do("add_lora", adapter(5)) is True
    assert shelf.do("add_lora", adapter(5)) is True
    assert shelf.num_loads == 1
    assert shelf.do("add_lora", adapter(5, load_inplace=True)) is True
    assert shelf.num_loads == 2
    assert shelf.do("pin_lora", 5) is True
    shelf.run({0: adapter(1)})
    shelf.run({1: adapter(2)}, finished=(0,))
    assert shelf.do("list_loras") == [2, 5]
    assert shelf.do("remove_lora", 5) is True
    assert shelf.do("remove_lora", 5) is False
    with pytest.raises(RequestError, match="adapter 5 is not here"):
        shelf.do("pin_lora", 5)
    assert shelf.loaded == [2]


def test_an_engine_without_adapters_says_so() -> None:
    shelf = Shelf(max_loras=0)
    with pytest.raises(RequestError, match="enable_lora is off"):
        shelf.do("add_lora", adapter(1))
    assert shelf.do("list_loras") == []
    assert not shelf.adapters.can_do(DeviceCommand(command_id=0, method="sleep"))
