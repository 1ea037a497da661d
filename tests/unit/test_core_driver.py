"""The driver that tests of a core are written with: its moves, and what it notices by itself."""

from __future__ import annotations

import pytest

from tests.unit.core.core_parts import add, make_driver, make_source
from trio_engine.outputs import FinishReason


def test_moves_are_offered_as_the_pipeline_allows_them() -> None:
    driver = make_driver()
    add(driver, make_source("a", max_tokens=3))
    assert (driver.can_schedule, driver.can_launch, driver.can_collect) == (True, False, False)
    assert driver.schedule()
    assert driver.schedule()
    assert (driver.can_schedule, driver.can_launch) == (False, True)
    driver.launch()
    assert (driver.can_launch, driver.can_collect) == (False, True)
    assert driver.collect()
    assert (driver.can_schedule, driver.can_launch, driver.can_collect) == (True, True, False)


def test_an_executor_that_launches_ahead_takes_two_plans() -> None:
    driver = make_driver(launches_ahead=True)
    add(driver, make_source("a", max_tokens=3))
    driver.schedule()
    driver.schedule()
    driver.launch()
    assert driver.can_launch
    driver.launch()
    assert not driver.can_launch


def test_a_log_holds_what_its_client_heard() -> None:
    driver = make_driver(num_clients=2)
    log = add(driver, make_source("a", client_index=1, max_tokens=3))
    driver.run_until_idle()
    assert (len(log.token_ids), log.finish_reason) == (3, FinishReason.LENGTH)
    assert driver.finished_ids == [set(), {"a"}]
    assert not driver.schedule()


def test_an_output_that_nobody_asked_for_is_noticed() -> None:
    driver = make_driver()
    driver.core.refuse(0, "x")
    with pytest.raises(AssertionError, match="output for 'x', which nobody added"):
        driver.receive()


def test_an_output_after_the_end_is_noticed() -> None:
    driver = make_driver()
    add(driver, make_source("a", max_tokens=1))
    driver.run_until_idle()
    driver.core.refuse(0, "a")
    with pytest.raises(AssertionError, match="output after the end of 'a'"):
        driver.receive()


def test_a_run_that_does_not_end_is_noticed() -> None:
    driver = make_driver()
    add(driver, make_source("a", max_tokens=20))
    with pytest.raises(AssertionError, match="no end after 10 plans"):
        driver.run_until_idle(max_steps=10)
