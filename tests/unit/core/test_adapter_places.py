"""Requests for more adapters than may run at once wait, and hold nobody else up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.core.core_parts import make_core, make_request, make_source, take
from tests.unit.core.scheduler_parts import end, ids, make_scheduler, schedule, settle
from trio_engine.core.admission import check_adapter
from trio_engine.errors import RequestError
from trio_engine.outputs import FinishReason
from trio_engine.requests import LoRARequest

if TYPE_CHECKING:
    from trio_engine.core.request import Request


def ask(request_id: str, lora_id: int = 0, prompt: int = 1) -> Request:
    adapter = LoRARequest(f"a{lora_id}", lora_id, f"/{lora_id}") if lora_id else None
    return make_request(request_id, prompt, source_fields={"lora_request": adapter})


def test_others_go_before_a_request_without_a_place_for_its_adapter() -> None:
    requests = [ask("one", 1), ask("two", 2), ask("one again", 1), ask("base")]
    scheduler = make_scheduler(*requests, max_num_seqs=4, max_loras=1)
    step = schedule(scheduler)
    assert ids(step.requests) == ["one", "one again", "base"]
    assert [row.lora_id for row in step.plan.new_rows] == [1, 1, 0]
    assert ids(scheduler.waiting) == ["two"]
    assert scheduler.waiting.num_held_up == 1
    settle(step)
    end(scheduler, requests[0])
    step = schedule(scheduler)
    assert ids(step.resumed) == []
    settle(step)
    end(scheduler, requests[2])
    step = schedule(scheduler)
    assert ids(step.resumed) == ["two"]
    assert scheduler.waiting.num_held_up == 0


def test_whoever_was_held_up_keeps_its_turn() -> None:
    requests = [ask("one", 1), ask("two", 2), ask("three", 3), ask("two again", 2)]
    scheduler = make_scheduler(*requests, max_num_seqs=4, max_loras=1)
    settle(schedule(scheduler))
    end(scheduler, requests[0])
    assert ids(schedule(scheduler).resumed) == ["two", "two again"]


def test_a_request_that_is_held_up_can_end() -> None:
    requests = [ask("one", 1), ask("two", 2)]
    scheduler = make_scheduler(*requests, max_num_seqs=4, max_loras=1)
    settle(schedule(scheduler))
    end(scheduler, requests[1])
    assert len(scheduler.waiting) == 0
    end(scheduler, requests[0])
    scheduler.check_integrity()


def test_a_preempted_request_takes_its_place_again() -> None:
    requests = [ask("one", 1), ask("two", 2)]
    scheduler = make_scheduler(*requests, max_num_seqs=4, max_loras=1)
    settle(schedule(scheduler))
    scheduler.preempt_all()
    scheduler.check_integrity()
    assert ids(schedule(scheduler).resumed) == ["one"]
    assert ids(scheduler.waiting) == ["two"]


def test_gauges_tell_who_is_held_up() -> None:
    core = make_core(enable_lora=True)
    for lora_id in (1, 2):
        core.add(
            make_source(
                f"r{lora_id}", source_fields={"lora_request": LoRARequest("a", lora_id, "/a")}
            )
        )
    core.schedule()
    core.flush_stats()
    (message,) = core.outboxes[0].take(0.0)
    stats = message.scheduler_stats
    assert stats is not None
    counts = (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs)
    assert counts == (1, 0, 1)


def test_an_engine_without_adapters_refuses_them() -> None:
    core = make_core()
    core.add(make_source("r", source_fields={"lora_request": LoRARequest("a", 1, "/a")}))
    (output,) = take(core)
    assert output.finish_reason is FinishReason.ERROR
    assert output.stop_reason == (
        "lora_request: this engine serves no adapters (enable_lora is off)"
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (LoRARequest("a", 0, "/a"), "lora_int_id must be 1 or more, got 0"),
        (LoRARequest("a", 1), "adapter 'a' has no lora_path"),
        (LoRARequest("a", 1, "/a", is_3d_lora_weight=True), "only PEFT folders"),
        (LoRARequest("a", 1, "/a", tensorizer_config_dict={}), "only PEFT folders"),
    ],
)
def test_an_adapter_that_says_too_little_is_refused(request_: LoRARequest, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        check_adapter(request_)
