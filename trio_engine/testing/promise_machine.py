"""What the machines of a core and of a whole engine have in common: books, oracle, invariants.

Public kit, pure but for the executor; needs hypothesis.

Rules have preconditions, or most steps would have nothing to do. But Hypothesis shrinks towards the
first rule, in the order of their names among those without arguments; a step whose first choice is
refused takes more choices than the shrinker removes in one go, so that it could not be dropped any
more. Hence the first rule of each machine can always be chosen.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from trio_engine.testing.flaky_executor import FlakyExecutor
from trio_engine.testing.promises import Promises
from trio_engine.testing.requests import make_request, run_alone
from trio_engine.testing.strategies import REQUEST_IDS, VOCAB_SIZE, prompts, request_options

if TYPE_CHECKING:
    from trio_engine.config import EngineConfig
    from trio_engine.core.engine_core import EngineCore
    from trio_engine.requests import EngineCoreRequest
    from trio_engine.testing.core_driver import RequestLog
    from trio_engine.testing.promises import Life

NUM_CLIENTS = 2
CLIENTS = st.integers(0, NUM_CLIENTS - 1)
ROWS = st.integers(0, 2)

NOBODYS_ID = "nobody's"
IDS_TO_ABORT = st.lists(st.sampled_from([*REQUEST_IDS, NOBODYS_ID]), min_size=1, max_size=3)
"""Of live and of ended requests, and one that is never used."""

# A request. Prompts of three tokens only, so that many begin alike.
IDS = st.sampled_from(REQUEST_IDS)
PROMPTS = prompts(3)
OPTIONS = request_options()

FIRST = st.lists(
    st.fixed_dictionaries(
        {"client": CLIENTS, "request_id": IDS, "prompt": PROMPTS, "options": OPTIONS}
    ),
    max_size=3,
)
"""Requests to begin with: Hypothesis leaves some rules out of each example, also ``add``."""


class PromiseMachine(RuleBasedStateMachine):
    """A machine whose requests are noted in ``promises``.

    Attributes:
        executor: finds wrong blocks, rows and tokens, and fails when told; set by ``start``.
        promises: what was asked, what came, and whether they agree.
    """

    executor: FlakyExecutor

    def __init__(self) -> None:
        super().__init__()
        self.promises = Promises(self.run_alone)
        self._num_requests = 0
        self._handled = sys.exception()

    @property
    def core(self) -> EngineCore:
        """The core under test; there after ``start``."""
        raise NotImplementedError

    @property
    def has_failed(self) -> bool:
        """In ``teardown``: a step has failed, and what it left says less than its own error."""
        return sys.exception() is not self._handled

    # To override

    def make_executor(self, config: EngineConfig, *, launches_ahead: bool) -> FlakyExecutor:
        """The executor that runs the plans."""
        return FlakyExecutor(config, launches_ahead=launches_ahead, vocab_size=VOCAB_SIZE)

    def run_alone(self, request: EngineCoreRequest) -> RequestLog:
        """The oracle of a request's tokens and end."""
        max_model_len = self.core.max_model_len
        return run_alone(request, max_model_len=max_model_len, vocab_size=VOCAB_SIZE)

    # For rules

    def begin_life(
        self, client: int, request_id: str, prompt: list[int], options: dict[str, Any]
    ) -> Life:
        """Notes a request that is about to be sent."""
        request = make_request(request_id, prompt, client=client, **options)
        request.arrival_time = float(self._num_requests)  # the same whenever this is run again
        self._num_requests += 1
        return self.promises.begin(request)

    # Promises

    @invariant()
    def blocks_free_plus_held_equal_total(self) -> None:
        """Tables, queues, slots and blocks agree."""
        self.core.check_integrity()

    @invariant()
    def no_output_after_a_terminal_event(self) -> None:
        """Nor any that nobody asked for, nor the end of another client's request."""
        self.promises.check_no_output_after_a_terminal_event()

    @invariant()
    def tokens_equal_a_solo_run(self) -> None:
        """Whatever happens beside a request."""
        self.promises.check_tokens_equal_a_solo_run()
        self.promises.check_logprobs_equal_a_solo_run()

    @invariant()
    def limits_are_kept(self) -> None:
        """No token more than was asked for."""
        self.promises.check_limits_are_kept()

    @invariant()
    def what_was_cached_was_there(self) -> None:
        """No prefix is shared between salts, and none is found that nobody had."""
        self.promises.check_what_was_cached_was_there()

    @invariant()
    def every_end_has_a_cause(self) -> None:
        """ABORT and ERROR come only where there was a reason."""
        self.promises.check_every_end_has_a_cause()

    @invariant()
    def a_failed_step_ends_only_the_request_at_fault(self) -> None:
        """One row is at fault in each failure that was planted."""
        reasons = [str(life.stop_reason) for life in self.promises.lives]
        num_ended = sum(reason.startswith("planted") for reason in reasons)
        assert num_ended <= self.executor.num_faults

    def check_nothing_is_held(self) -> None:
        """Once all is done."""
        statistics = self.core.statistics()
        assert not self.core.has_requests, statistics
        assert statistics.num_free_blocks == statistics.num_blocks, statistics
