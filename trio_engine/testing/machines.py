"""The state machines for Hypothesis, by name.

Public kit; needs hypothesis. Each is a test by itself (``run_state_machine_as_test``, or its
``TestCase``). Subclass one to add rules, or to put a part of your own in. Invariants are called
after the promises in ``docs/testing.md``, and a failure prints as steps that can be pasted into a
test.
"""

from __future__ import annotations

from trio_engine.testing.block_pool_machine import BlockPoolMachine
from trio_engine.testing.engine_core_machine import EngineCoreMachine
from trio_engine.testing.engine_machine import EngineMachine

__all__ = ["BlockPoolMachine", "EngineCoreMachine", "EngineMachine"]
