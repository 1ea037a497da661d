"""The rows that decode: one more token each in every plan, until something about one changes.

Pure. Of a member, nothing is counted while it is one: what is planned of it follows from the number
of the last plan. So a plan costs as much for 256 members as for one. A member is looked at when its
blocks are full, and leaves before the plan of its last token, or when it ends or is preempted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from trio_engine.core.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable


class DecodeRows(msgspec.Struct, frozen=True, eq=False):
    """Who was a member when a plan was made. Plans share one while nobody joins or leaves.

    Attributes:
        requests: the members, those with nothing to tell but tokens first.
        plain: these alone.
        slots: aligned with ``requests``, as the next two.
        counts: 1 each.
        samples: True each.
        watched_token_ids: all that may end one of the plain ones.
        client_indices: of the plain ones.
        num_departures: of the batch at that time.
    """

    requests: list[Request]
    plain: list[Request]
    slots: list[int]
    counts: list[int]
    samples: list[bool]
    watched_token_ids: frozenset[int | None]
    client_indices: frozenset[int]
    num_departures: int

    @classmethod
    def of(cls, members: Iterable[Request], num_departures: int) -> DecodeRows:
        """The rows of these members."""
        plain: list[Request] = []
        others: list[Request] = []
        for request in members:
            (plain if request.is_plain else others).append(request)
        requests = plain + others if others else plain
        return cls(
            requests,
            plain,
            [request.slot for request in requests],
            [1] * len(requests),
            [True] * len(requests),
            frozenset().union(*[request.watched_token_ids for request in plain]),
            frozenset([request.client_index for request in plain]),
            num_departures,
        )


class DecodeBatch:
    """Requests each of which has a row of one token, which samples, in every plan.

    Attributes:
        num_plans: how many have been made. A member's tokens, unsettled ones included, are this
            number and its ``Request.decode_offset``.
        num_departures: how often a member has left.
    """

    __slots__ = ("_due", "_members", "_rows", "num_departures", "num_plans")

    def __init__(self) -> None:
        self.num_plans = 0
        self.num_departures = 0
        # By number of the plan for which they must be looked at, as ``Request.decode_due`` says.
        self._due: dict[int, dict[Request, None]] = {}
        self._members: dict[Request, None] = {}
        # None if somebody has joined or left since.
        self._rows: DecodeRows | None = None

    def __len__(self) -> int:
        return len(self._members)

    def rows(self) -> DecodeRows:
        """All members as they are now."""
        if self._rows is None:
            self._rows = DecodeRows.of(self._members, self.num_departures)
        return self._rows

    def num_planned_tokens(self, member: Request) -> int:
        """Leading tokens of a member that all plans so far compute: all but the newest."""
        assert member.decode_offset is not None
        return member.decode_offset + self.num_plans - 1

    def join(self, request: Request, num_plain_tokens: int) -> None:
        """A request whose newest token the last plan samples goes on decoding.

        ``num_plain_tokens`` is how many of its tokens, from the first, can be planned before it
        must be looked at; at least as many as are.
        """
        num_tokens = len(request.token_ids) + request.num_unsettled_tokens
        request.decode_offset = num_tokens - self.num_plans
        self._members[request] = None
        self._rows = None
        self._set_due(request, num_plain_tokens)

    def are_all(self, num_running: int) -> bool:
        """Whether the members are all that run, and the next plan must look at none of them."""
        return len(self._members) == num_running > 0 and self.num_plans + 1 not in self._due

    def take_due(self) -> list[Request]:
        """Members that the next plan must look at: ``extend`` them, or let them ``leave``."""
        due = self._due.pop(self.num_plans + 1, None)
        return [] if due is None else list(due)

    def extend(self, member: Request, num_plain_tokens: int) -> None:
        """A member that was due has got room."""
        self._set_due(member, num_plain_tokens)

    def leave(self, request: Request) -> None:
        """Counts again what is planned of a request, if it is a member; it is none any more."""
        if request.decode_offset is None:
            return
        request.num_planned_tokens = self.num_planned_tokens(request)
        request.num_unsettled_tokens = request.num_planned_tokens + 1 - len(request.token_ids)
        request.decode_offset = None
        del self._members[request]
        self._rows = None
        self.num_departures += 1
        due = self._due.get(request.decode_due)
        if due is not None:
            due.pop(request, None)

    def leave_all(self) -> None:
        """Every member leaves."""
        for request in list(self._members):
            self.leave(request)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raises AssertionError unless members and what is noted of them agree."""
        joined = {request for request in running if request.decode_offset is not None}
        assert joined == self._members.keys(), "a member does not run, or is not known"
        for request in joined:
            num_unsettled = self.num_planned_tokens(request) + 1 - len(request.token_ids)
            assert 0 <= num_unsettled <= 2, f"{request} has {num_unsettled} unsettled tokens"
            assert request.decode_due > self.num_plans, f"{request} was not looked at"
            assert request in self._due.get(request.decode_due, ()), f"{request} is never due"
        assert sum(map(len, self._due.values())) == len(joined), "who has left is due"
        assert min(self._due, default=self.num_plans + 1) > self.num_plans, "a plan was left out"

    def _set_due(self, member: Request, num_plain_tokens: int) -> None:
        assert member.decode_offset is not None
        # The plan before which as many are planned.
        member.decode_due = num_plain_tokens - member.decode_offset + 2
        self._due.setdefault(member.decode_due, {})[member] = None
