"""Who compiles for whom, in which order, and how that ends. The compiler is played by hand."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from trio.testing import wait_all_tasks_blocked

from tests.unit.core.core_parts import make_request
from trio_engine.engine.grammar_service import MAX_WORKERS, GrammarService
from trio_engine.errors import OverloadedError, RequestError
from trio_engine.sampling_params import StructuredOutputsParams
from trio_engine.testing.hashed_grammar import HashedGrammar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio_engine.core.plan import RowGrammar
    from trio_engine.core.request import Request

GRAMMAR = HashedGrammar(16, 3)


class HandCompiler:
    """Compiles what a test opens, by the regex asked for."""

    num_abandoned_threads = 0

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.is_closed = False
        self._gates: dict[str, trio.Event] = {}

    def open(self, regex: str) -> None:
        self._gates.setdefault(regex, trio.Event()).set()

    async def compile(self, params: StructuredOutputsParams) -> RowGrammar:
        assert params.regex is not None
        self.begun.append(params.regex)
        try:
            await self._gates.setdefault(params.regex, trio.Event()).wait()
        except trio.Cancelled:
            self.cancelled.append(params.regex)
            raise
        if params.regex == "bad":
            raise RequestError("it is no grammar")
        if params.regex == "busy":
            raise OverloadedError("too much to do")
        return GRAMMAR

    async def aclose(self) -> None:
        self.is_closed = True
        await trio.lowlevel.checkpoint()


class Rig:
    """A service, and what it said, by request id."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.compiler = HandCompiler()
        self.done: dict[str, RowGrammar | str] = {}
        self.service = GrammarService(self.compiler, nursery, self._note)

    def start(self, *regexes: str) -> list[Request]:
        requests = [ask(regex) for regex in regexes]
        for request in requests:
            self.service.start(request)
        return requests

    def _note(self, request: Request, grammar: RowGrammar | str) -> None:
        self.done[request.request_id] = grammar


def ask(regex: str) -> Request:
    return make_request(regex, structured_outputs=StructuredOutputsParams(regex=regex))


@asynccontextmanager
async def open_rig() -> AsyncIterator[Rig]:
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            yield Rig(nursery)
            nursery.cancel_scope.cancel()


async def test_a_request_hears_what_became_of_its_grammar() -> None:
    async with open_rig() as rig:
        rig.start("good", "bad", "busy")
        for regex in ("good", "bad", "busy"):
            rig.compiler.open(regex)
        await wait_all_tasks_blocked()
        assert rig.done == {"good": GRAMMAR, "bad": "it is no grammar", "busy": "too much to do"}


async def test_one_that_takes_long_does_not_hold_up_the_next() -> None:
    async with open_rig() as rig:
        rig.start("slow", "quick")
        rig.compiler.open("quick")
        await wait_all_tasks_blocked()
        assert rig.done == {"quick": GRAMMAR}


async def test_so_many_are_under_way_at_once_and_the_rest_follow_in_order() -> None:
    async with open_rig() as rig:
        names = [f"r{index}" for index in range(MAX_WORKERS + 3)]
        rig.start(*names)
        await wait_all_tasks_blocked()
        assert sorted(rig.compiler.begun) == names[:MAX_WORKERS]
        for index, name in enumerate(names[:3]):
            rig.compiler.open(name)
            await wait_all_tasks_blocked()
            assert rig.compiler.begun[MAX_WORKERS:] == names[MAX_WORKERS : MAX_WORKERS + index + 1]


async def test_workers_come_again_after_all_was_done() -> None:
    async with open_rig() as rig:
        for name in ("first", "second"):
            rig.start(name)
            rig.compiler.open(name)
            await wait_all_tasks_blocked()
        assert set(rig.done) == {"first", "second"}


async def test_a_cancelled_request_hears_nothing_and_frees_its_worker() -> None:
    async with open_rig() as rig:
        stuck = rig.start(*(f"stuck{index}" for index in range(MAX_WORKERS)))
        rig.start("next")
        rig.compiler.open("next")
        await wait_all_tasks_blocked()
        assert rig.done == {}
        rig.service.cancel(stuck[0])
        await wait_all_tasks_blocked()
        assert rig.compiler.cancelled == ["stuck0"]
        assert rig.done == {"next": GRAMMAR}


async def test_a_request_can_be_cancelled_before_its_turn_and_after_its_end() -> None:
    async with open_rig() as rig:
        rig.start(*(f"stuck{index}" for index in range(MAX_WORKERS)))
        (waiting,) = rig.start("waiting")
        rig.service.cancel(waiting)
        rig.service.cancel(waiting)
        for index in range(MAX_WORKERS):
            rig.compiler.open(f"stuck{index}")
        await wait_all_tasks_blocked()
        assert "waiting" not in rig.compiler.begun
        (done,) = rig.start("done")
        rig.compiler.open("done")
        await wait_all_tasks_blocked()
        rig.service.cancel(done)
        assert rig.done["done"] is GRAMMAR


async def test_the_end_of_the_nursery_ends_all_and_closes_the_compiler() -> None:
    async with open_rig() as rig:
        rig.start("stuck")
        await wait_all_tasks_blocked()
        assert not rig.compiler.is_closed
    assert rig.compiler.cancelled == ["stuck"]
    assert rig.compiler.is_closed
    assert rig.done == {}
