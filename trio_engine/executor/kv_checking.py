"""An executor without a model that finds every mistake in blocks, rows and tokens.

No torch. Its KV cache holds one integer a position, which stands, as real KV does, for the token
there and all before it. A wrong block table, a stale or doubly used block, a wrong cache hit, a
lost or doubled token or a bad replay raises or changes the tokens, so that a request's run alone
is the oracle for its run among others.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from trio_engine.core.plan import NO_TOKEN, ExecutorProperties, StepResult
from trio_engine.errors import RequestError, StepError
from trio_engine.executor.grammar_draws import GrammarDraws
from trio_engine.executor.made_up_logprobs import MadeUpLogprobs
from trio_engine.executor.null import modelless_adapters, modelless_properties

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trio_engine.config import EngineConfig
    from trio_engine.core.plan import DeviceCommand, NewRow, StepPlan


HIDDEN_SIZE = 4
"""Of a prompt embedding, whose bytes count as those of a token do."""


class _Row(msgspec.Struct, eq=False):
    lora_id: int
    num_computed_tokens: int
    block_ids: list[int]
    # Prompt and output; the last of them is drawn and never computed.
    max_total_tokens: int
    # What the cache must hold at each position whose token is known.
    contents: list[int] = msgspec.field(default_factory=list)

    def append(self, content: int) -> None:
        before = self.contents[-1] if self.contents else self.lora_id
        self.contents.append(_hash((before, content)))


class KVCheckingExecutor:
    """Draws as next token a hash of everything that it reads back through the block table.

    Args:
        config: block and row limits.
        launches_ahead: which order of calls to ask of the engine; results are the same.
        vocab_size: of the tokens drawn; None is that of all executors without a model.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        launches_ahead: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.launches_ahead = launches_ahead
        self._properties = msgspec.structs.replace(
            modelless_properties(config), hidden_size=HIDDEN_SIZE
        )
        if vocab_size is not None:
            self._properties = msgspec.structs.replace(self._properties, vocab_size=vocab_size)
        self._config = config
        self._block_size = self._properties.block_size
        self._store: dict[int, int] = {}
        self._rows: dict[int, _Row] = {}
        self._logprobs = MadeUpLogprobs(self._properties.vocab_size)
        self._grammars = GrammarDraws(self._properties.vocab_size)
        self._adapters = modelless_adapters(config)
        self._results: deque[StepResult] = deque()
        self._next_plan_id = 0
        self._asleep: set[str] = set()

    def load(self) -> ExecutorProperties:
        """Nothing to load."""
        return self._properties

    def launch(self, plan: StepPlan) -> None:
        """Applies the plan at once.

        Raises:
            RequestStepError: there is no place for a row's adapter.
            StepError: what the plan says contradicts the rows or the store, or memory sleeps.
        """
        if self._asleep:
            raise StepError(
                f"plan {plan.plan_id}, but memory sleeps: {', '.join(sorted(self._asleep))}"
            )
        self._check_order(plan)
        self._adapters.apply(plan)
        self._apply_changes(plan)
        if len(set(plan.slots)) != len(plan.slots) or not plan.slots:
            raise StepError(f"plan {plan.plan_id} names slots {list(plan.slots)}")
        pairs = zip(plan.slots, plan.num_scheduled_tokens, strict=True)
        token_ids = [self._run_row(slot, num_tokens) for slot, num_tokens in pairs]
        result = StepResult(plan_id=plan.plan_id, token_ids=token_ids)
        self._grammars.put_ends_into(result)
        self._logprobs.put_into(result, plan.slots)
        self._results.append(result)

    def collect(self) -> StepResult:
        """The oldest result."""
        return self._results.popleft()

    def command(self, command: DeviceCommand) -> Any:
        """Sleeps, wakes up, and checks that no plan is uncollected. A dummy batch is nothing.

        The KV cache is forgotten in its sleep, so that a block read after it without having been
        written again is found.
        """
        if self._results:
            raise StepError(f"command {command.method!r} overtook a plan")
        if self._adapters.can_do(command):
            return self._adapters.do(command)
        if command.method == "sleep":
            (tags,) = command.args
            self._asleep.update(tags)
            if "kv_cache" in tags:
                self._store.clear()
        elif command.method == "wake_up":
            (tags,) = command.args
            self._asleep.difference_update(tags)
        elif command.method != "execute_dummy_batch":
            raise RequestError(f"the kv-checking executor has no method {command.method!r}")
        elif self._asleep:
            raise RequestError(f"memory sleeps: {', '.join(sorted(self._asleep))}")

    def shutdown(self) -> None:
        """Nothing to release."""

    def _check_order(self, plan: StepPlan) -> None:
        allowed = 2 if self.launches_ahead else 1
        if len(self._results) >= allowed:
            raise StepError(f"plan {plan.plan_id} launched over {len(self._results)} others")
        # After a failed step, plans in between were dropped and the next one starts anew.
        is_later = plan.reset and plan.plan_id > self._next_plan_id
        if plan.plan_id != self._next_plan_id and not is_later:
            raise StepError(f"plan {plan.plan_id} came instead of {self._next_plan_id}")
        self._next_plan_id = plan.plan_id + 1

    def _apply_changes(self, plan: StepPlan) -> None:
        self._grammars.apply(plan)
        if plan.reset:
            self._rows.clear()
        for slot in plan.finished_slots:
            if self._rows.pop(slot, None) is None:
                raise StepError(f"plan {plan.plan_id} finishes slot {slot}, which has no row")
        for row in plan.new_rows:
            self._set_up(row, plan)
        for slot, block_ids in plan.new_block_ids:
            self._row(slot).block_ids.extend(block_ids)
            self._clear(block_ids)

    def _set_up(self, row: NewRow, plan: StepPlan) -> None:
        if row.slot in self._rows:
            raise StepError(f"plan {plan.plan_id} sets up slot {row.slot} over a live row")
        if not 0 <= row.slot < self._config.max_num_seqs:
            raise StepError(f"plan {plan.plan_id} names slot {row.slot}")
        if not 1 <= row.num_prompt_tokens <= len(row.token_ids):
            raise StepError(f"row of {row.request_id!r} lacks prompt tokens")
        has_output = len(row.token_ids) > row.num_prompt_tokens
        asks_for_prompt = row.sampling_params.prompt_logprobs is not None and not has_output
        if asks_for_prompt and row.num_computed_tokens:
            raise StepError(f"row of {row.request_id!r} cannot tell its prompt's logprobs")
        self._logprobs.set_up(row)
        made = self._rows[row.slot] = _Row(
            row.lora_id,
            row.num_computed_tokens,
            row.block_ids.copy(),
            self._max_total_tokens(row),
        )
        for content in _contents_of(row):
            made.append(content)
        self._clear(row.block_ids[-(-row.num_computed_tokens // self._block_size) :])

    def _clear(self, block_ids: Sequence[int]) -> None:
        """As a device may: nobody wants any more what these blocks held."""
        for block_id in block_ids:
            for address in range(block_id * self._block_size, (block_id + 1) * self._block_size):
                self._store.pop(address, None)

    def _max_total_tokens(self, row: NewRow) -> int:
        limit, max_tokens = self._properties.max_model_len, row.sampling_params.max_tokens
        return limit if max_tokens is None else min(limit, row.num_prompt_tokens + max_tokens)

    def _row(self, slot: int) -> _Row:
        row = self._rows.get(slot)
        if row is None:
            raise StepError(f"slot {slot} has no row")
        return row

    def _run_row(self, slot: int, num_tokens: int) -> int:
        row = self._row(slot)
        start, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        if num_tokens < 1 or end > len(row.contents):
            raise StepError(f"{num_tokens} tokens after {start} of {len(row.contents)} known")
        if end >= row.max_total_tokens:
            raise StepError(f"computes token {end - 1}, the last that its limits allow")
        for position in range(start, end):
            self._store[self._address(row, position)] = row.contents[position]
        row.num_computed_tokens = end
        contents = [self._read(row, position) for position in range(end)]
        if end < len(row.contents):
            return NO_TOKEN
        token_id = self._grammars.draw(slot, _hash(contents) % self._properties.vocab_size)
        row.append(token_id)
        return token_id

    def _read(self, row: _Row, position: int) -> int:
        address = self._address(row, position)
        found = self._store.get(address)
        if found is None:
            raise StepError(f"position {position} reads slot {address}, which nobody wrote")
        if found != row.contents[position]:
            raise StepError(f"position {position} reads slot {address} with other content")
        return found

    def _address(self, row: _Row, position: int) -> int:
        index, offset = divmod(position, self._block_size)
        if index >= len(row.block_ids):
            raise StepError(f"position {position} is beyond {len(row.block_ids)} blocks")
        block_id = row.block_ids[index]
        if not 0 <= block_id < self._properties.num_blocks:
            raise StepError(f"there is no block {block_id}")
        return block_id * self._block_size + offset


def _contents_of(row: NewRow) -> Iterator[int]:
    """A number for each position of a new row: its token, or a negative one for an embedding."""
    embeds, is_token = row.prompt_embeds, row.prompt_is_token_ids
    for position, token_id in enumerate(row.token_ids):
        if embeds is None or position >= row.num_prompt_tokens or (is_token and is_token[position]):
            yield token_id
        else:
            size = embeds.data.nbytes // embeds.shape[0]
            data = embeds.data[position * size : (position + 1) * size]
            yield -2 - int.from_bytes(data, "little")


def _hash(values: Sequence[int]) -> int:
    # Python's hash of a tuple of integers is not salted: the same in every process.
    return hash(tuple(values))
