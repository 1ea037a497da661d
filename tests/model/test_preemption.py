"""A request that loses its blocks goes on as if it had not, whatever it asked for.

A request of low priority runs in a small pool. Others of high priority come one by one, each just
fits and then grows, so that each preempts it exactly once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.model.decoding import RunnerExecutor, load_decoder
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.config import EngineConfig
from trio_engine.outputs import EngineCoreEventType, FinishReason
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.requests import make_core, make_request

if TYPE_CHECKING:
    from trio_engine.model.decoder import Decoder
    from trio_engine.requests import EngineCoreRequest
    from trio_engine.testing.core_driver import RequestLog

pytestmark = pytest.mark.known_fault(kind="forgetful-preemption")

NUM_BLOCKS = 26
"""Of one token each: room for the victim and three tokens more."""
PROMPT = [5, 6, 7]
NUM_TOKENS = 20
MAX_MOVES = 200

SEEDED = "penalties, seed and logprobs"
OPTIONS: dict[str, dict[str, Any]] = {
    SEEDED: {
        "temperature": 1.0,
        "seed": 7,
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logprobs": 2,
    },
    # Every token but the masked ones would stop it.
    "min_tokens": {
        "temperature": 0.0,
        "frequency_penalty": 1.5,
        "logprobs": 2,
        "min_tokens": NUM_TOKENS - 1,
        "stop_token_ids": list(range(0, 128, 2)),
    },
    "bad words and prompt_logprobs": {
        "temperature": 0.0,
        "allowed_token_ids": [8, 9, 10],
        "bad_words_token_ids": [[8, 8], [9, 10, 9], [10, 10]],
        "logprobs": 0,
        "prompt_logprobs": 2,
    },
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder, _ = make_hf_folder("llama", tmp_path_factory.mktemp("llama"))
    return load_decoder(ModelFiles("folder", folder))


def make_victim(**options: Any) -> EngineCoreRequest:
    return make_request("victim", PROMPT, priority=1, max_tokens=NUM_TOKENS, **options)


def make_driver(
    decoder: Decoder, *, launches_ahead: bool = False, num_blocks: int = NUM_BLOCKS, **config: Any
) -> CoreDriver:
    engine_config = EngineConfig(
        max_model_len=NUM_BLOCKS,
        max_num_seqs=4,
        block_size=1,
        num_blocks=num_blocks,
        scheduling_policy="priority",
        **config,
    )
    executor = RunnerExecutor(decoder, engine_config, launches_ahead=launches_ahead)
    return CoreDriver(make_core(engine_config, executor), executor)


def run_alone(decoder: Decoder, request: EngineCoreRequest) -> RequestLog:
    driver = make_driver(decoder, num_blocks=64)
    log = driver.listen(0, request.request_id)
    driver.core.add(request)
    driver.run_until_idle()
    return log


class Contention:
    """The victim, and those who preempt it."""

    def __init__(self, driver: CoreDriver, victim: EngineCoreRequest) -> None:
        self.driver = driver
        self.victim = driver.listen(0, victim.request_id)
        driver.core.add(victim)
        self.others: list[tuple[EngineCoreRequest, RequestLog]] = []
        self.num_moves = 0

    @property
    def num_preemptions(self) -> int:
        return self.driver.core.statistics().num_preemptions

    def run_until_heard(self, num_tokens: int) -> None:
        while len(self.victim.token_ids) < num_tokens:
            self.move()

    def run_until_preempted(self, *, margin: int) -> None:
        """Another one comes, and preempts the victim.

        Args:
            margin: blocks that the victim may take before the other one has started. Less is
                waited for for ever, and with more the victim runs on for some tokens.
        """
        while self.driver.core.statistics().num_running_requests == 0:
            self.move()
        length = self.driver.core.statistics().num_free_blocks - margin
        prompt = [(31 * len(self.others) + position) % 128 for position in range(length)]
        request = make_request(f"other {len(self.others)}", prompt, max_tokens=4)
        self.others.append((request, self.driver.listen(0, request.request_id)))
        self.driver.core.add(request)
        before = self.num_preemptions
        while self.num_preemptions == before:
            self.move()

    def run_until_the_other_has_ended(self) -> None:
        _, log = self.others[-1]
        while log.finish_reason is None:
            self.move()

    def move(self) -> None:
        """One plan more and one result less, as in a full pipeline."""
        driver = self.driver
        self.num_moves += 1
        assert self.num_moves < MAX_MOVES, "no end"
        while driver.can_schedule and driver.schedule():
            pass
        if driver.can_launch:
            driver.launch()
        if driver.can_collect and not (driver.can_launch and driver.executor.launches_ahead):
            driver.collect()
        driver.receive()
        driver.core.check_integrity()


def logprobs_of(log: RequestLog) -> tuple[list[int], Any]:
    """Token ids and log probabilities of all tokens, one row each."""
    rows = [output.new_logprobs for output in log.outputs if output.new_logprobs is not None]
    ids = [row for lists in rows for row in lists.logprob_token_ids.tolist()]
    return ids, np.concatenate([lists.logprobs for lists in rows])


def check_equal(log: RequestLog, alone: RequestLog) -> None:
    assert (log.token_ids, log.finish_reason) == (alone.token_ids, alone.finish_reason)
    assert log.outputs[-1].stop_reason == alone.outputs[-1].stop_reason
    ids, values = logprobs_of(log)
    wanted_ids, wanted = logprobs_of(alone)
    assert ids == wanted_ids
    np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-4)
    told = [output for output in log.outputs if output.new_prompt_logprobs_tensors is not None]
    asked = [output for output in alone.outputs if output.new_prompt_logprobs_tensors is not None]
    assert len(told) == len(asked)


def count_events(log: RequestLog, kind: EngineCoreEventType) -> int:
    return sum(event.type is kind for output in log.outputs for event in output.events or ())


def check_run(run: Contention, decoder: Decoder, name: str) -> None:
    """Everybody heard what is heard alone, once."""
    count = len(run.others)
    assert run.num_preemptions == count
    check_equal(run.victim, run_alone(decoder, make_victim(**OPTIONS[name])))
    assert len(run.victim.token_ids) == NUM_TOKENS
    assert count_events(run.victim, EngineCoreEventType.PREEMPTED) == count
    assert count_events(run.victim, EngineCoreEventType.SCHEDULED) == count + 1
    assert sum(output.prefill_stats is not None for output in run.victim.outputs) == 1
    for request, log in run.others:
        assert log.token_ids == run_alone(decoder, request).token_ids
        assert count_events(log, EngineCoreEventType.PREEMPTED) == 0
    assert run.driver.core.statistics().num_free_blocks == NUM_BLOCKS


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
@pytest.mark.parametrize(
    ("name", "count"), [(SEEDED, 1), (SEEDED, 2), *((name, 5) for name in OPTIONS)]
)
def test_preempted_so_often_a_request_gives_what_it_gives_alone(
    decoder: Decoder, name: str, count: int, launches_ahead: bool
) -> None:
    """Nothing is told twice, and what it asked for counts on over all of its lives."""
    run = Contention(
        make_driver(decoder, launches_ahead=launches_ahead), make_victim(**OPTIONS[name])
    )
    run.run_until_heard(3)
    for _ in range(count):
        run.run_until_preempted(margin=2)
        run.run_until_the_other_has_ended()
    run.driver.run_until_idle()
    assert len(run.others) == count
    check_run(run, decoder, name)


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
@pytest.mark.parametrize("name", OPTIONS)
def test_preempted_in_the_middle_of_a_replay_it_begins_that_again(
    decoder: Decoder, name: str, launches_ahead: bool
) -> None:
    """The replay is of its output too, in chunks, from its first token."""
    driver = make_driver(
        decoder,
        launches_ahead=launches_ahead,
        long_prefill_token_threshold=2,
        enable_prefix_caching=False,
    )
    run = Contention(driver, make_victim(**OPTIONS[name]))
    run.run_until_heard(12)
    run.run_until_preempted(margin=2)
    run.run_until_the_other_has_ended()
    heard = len(run.victim.token_ids)
    run.run_until_preempted(margin=0)
    assert len(run.victim.token_ids) == heard, "its replay was over"
    driver.run_until_idle()
    check_run(run, decoder, name)


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
def test_aborted_while_it_is_preempted_a_request_is_gone(
    decoder: Decoder, launches_ahead: bool
) -> None:
    options = OPTIONS[SEEDED]
    run = Contention(make_driver(decoder, launches_ahead=launches_ahead), make_victim(**options))
    run.run_until_heard(3)
    run.run_until_preempted(margin=2)
    heard = list(run.victim.token_ids)
    run.driver.core.abort(0, ["victim"])
    run.driver.core.check_integrity()
    run.driver.run_until_idle()
    assert (run.victim.token_ids, run.victim.finish_reason) == (heard, None)
    assert heard == run_alone(decoder, make_victim(**options)).token_ids[: len(heard)]
    assert "victim" in run.driver.finished_ids[0]
    ((request, log),) = run.others
    assert log.token_ids == run_alone(decoder, request).token_ids
    fresh = run.driver.listen(0, "fresh")
    run.driver.core.add(make_request("fresh", PROMPT, max_tokens=4))
    run.driver.run_until_idle()
    assert (len(fresh.token_ids), fresh.finish_reason) == (4, FinishReason.LENGTH)
    statistics = run.driver.core.statistics()
    assert statistics.num_running_requests == statistics.num_waiting_requests == 0
    assert statistics.num_free_blocks == NUM_BLOCKS
