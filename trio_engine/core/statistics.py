"""Counts of the core: for people, for front ends' metrics, and as a test oracle.

Pure.
"""

from __future__ import annotations

import msgspec


class EngineCoreStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts at one moment, for people and as a test oracle."""

    num_running_requests: int
    num_waiting_requests: int
    num_free_blocks: int
    num_blocks: int
    num_plans_in_flight: int
    num_steps: int
    num_preemptions: int
    is_paused: bool
    is_asleep: bool
    is_draining: bool
