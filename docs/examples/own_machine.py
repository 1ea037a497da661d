"""A state machine with a rule and a promise of its own, on top of those of the testing kit.

Needs Hypothesis, which the extra ``test`` installs.
"""

from __future__ import annotations

import logging

from hypothesis import settings, strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from trio_engine.testing.machines import EngineMachine


class OurClients(EngineMachine):
    """Our service drops all requests of a client at once, in the order in which they came."""

    @rule(client=st.integers(0, 1))
    def drop_all(self, client: int) -> None:
        requests = [life.request for life in self.promises.open_lives(client)]
        self.abort(client, [request.request_id for request in requests])

    @invariant()
    def no_more_run_than_there_are_rows(self) -> None:
        statistics = self.core.statistics()
        assert statistics.num_running_requests <= self.config.max_num_seqs


def main() -> None:
    logging.disable()  # what the engine says about refused messages
    options = settings(OurClients.TestCase.settings, max_examples=20, database=None)
    run_state_machine_as_test(OurClients, settings=options)
    print("all promises were kept")


if __name__ == "__main__":
    main()
