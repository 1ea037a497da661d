"""``trio-engine generate``: streams a model's answers to one or several prompts.

Cli. Also the shortest complete example of the library: one engine, one task a prompt.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec
import trio

from trio_engine.checkpoint import locate_model
from trio_engine.client.launcher import open_engine
from trio_engine.engine_arguments import add_engine_arguments, config_from_arguments
from trio_engine.errors import EngineError
from trio_engine.observability.logs import TerminalHandler, parse_progress
from trio_engine.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from trio_engine.client.base import EngineClient
    from trio_engine.config import EngineConfig
    from trio_engine.text.processor import Prompt
    from trio_engine.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 256


class Answer(msgspec.Struct, kw_only=True):
    """What ``--json`` prints of a prompt.

    ``ttft_s``: from sending to the first token. ``tokens_per_s``: over the tokens after it.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_s: float
    tokens_per_s: float


class Failure(msgspec.Struct, kw_only=True):
    """What ``--json`` prints of a prompt that got no answer."""

    prompt: str
    error: str


def run(arguments: list[str]) -> int:
    """Prints the answers.

    Returns:
        The exit status: 0, or 1 if a prompt got no answer.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the engine was ended.
    """
    options = _parser().parse_args(arguments)
    _show_progress()
    status, interrupted = 1, False
    try:
        config = config_from_arguments(options)
        params = SamplingParams(
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=options.seed,
            output_kind=RequestOutputKind.DELTA,
        )
        status = trio.run(_generate, config, params, options)
    except* EngineError as group:
        # A nursery is between here and where it was raised, and one error is enough to say.
        _complain(_first(group))
    except* OSError as group:
        _give_up_output(_first(group))
    except* KeyboardInterrupt:
        interrupted = True
    if interrupted:
        raise KeyboardInterrupt  # by itself, not in a nursery's group
    return status


def _give_up_output(error: BaseException) -> None:
    """Standard output cannot be written: its reader has left, or its disk is full."""
    if not isinstance(error, BrokenPipeError):
        _complain(error)
    # What is still buffered must not fail once more when the interpreter ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trio-engine generate",
        usage="%(prog)s [OPTION]... PROMPT...",  # all options would hide what is wrong with one
        description="Stream a model's answers to one or several prompts. They run at once, and are"
        " printed one after the other.",
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text of a question")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put each prompt into the model's chat template (default: where it has one)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"most tokens of an answer (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="makes draws repeatable (default: they differ)"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object a prompt, with times in seconds",
    )
    add_engine_arguments(parser)
    return parser


def _show_progress() -> None:
    """Shows on a terminal how far the weights are; the rest of the engine's log is kept back."""
    if not sys.stderr.isatty():
        return
    handler = TerminalHandler(sys.stderr)
    handler.addFilter(lambda record: parse_progress(record.getMessage()) is not None)
    engine_log = logging.getLogger("trio_engine.engine")
    engine_log.addHandler(handler)
    engine_log.setLevel(logging.INFO)


def _complain(error: BaseException) -> None:
    print(f"trio-engine: {error}", file=sys.stderr)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _generate(
    config: EngineConfig, params: SamplingParams, options: argparse.Namespace
) -> int:
    """Prints every answer, or why there is none, in the order of the prompts.

    Returns:
        The exit status.
    """
    tokenizer = None
    if config.tokenizer_model is not None:
        # Before the engine starts: a model that is not there is said at once.
        tokenizer = await trio.to_thread.run_sync(_load_tokenizer, config.tokenizer_model)
    chat = options.chat
    if chat is None:
        chat = tokenizer is not None and tokenizer.chat_template is not None
    async with open_engine(config, tokenizer=tokenizer) as engine, trio.open_nursery() as nursery:
        followers = [_Follower(text, options.max_tokens) for text in options.prompts]
        for follower in followers:
            nursery.start_soon(follower.run, engine, params, chat)
        for follower in followers:
            if options.json:
                await _print_json(follower)
            else:
                await _print_stream(follower, with_prompt=len(followers) > 1)
        return int(any(follower.error is not None for follower in followers))


async def _print_json(follower: _Follower) -> None:
    result = await follower.wait_result()
    print(msgspec.json.encode(result).decode(), flush=True)
    if follower.error is not None:
        _complain(follower.error)


async def _print_stream(follower: _Follower, *, with_prompt: bool) -> None:
    if with_prompt:
        print(f"> {follower.prompt}", flush=True)
    has_text = False
    async for text in follower.texts:
        has_text = True
        print(text, end="", flush=True)
    await follower.wait_result()
    if follower.error is None or has_text or with_prompt:
        print("\n" if with_prompt else "", flush=True)
    if follower.error is not None:
        _complain(follower.error)


def _load_tokenizer(model: str) -> Tokenizer:
    from trio_engine.text.tokenizer import load_tokenizer

    return load_tokenizer(locate_model(model))


class _Follower:
    """Follows one prompt's answer; all run at once, and are printed one after the other.

    Attributes:
        texts: the pieces of text as they come; ends with the answer.
        error: why there is no whole answer. Its neighbours have theirs all the same.
    """

    def __init__(self, prompt: str, max_tokens: int) -> None:
        self.prompt = prompt
        # A piece holds at least one token, so this never makes an answer wait for its turn.
        self._pieces, self.texts = trio.open_memory_channel[str](max_tokens + 1)
        self._ended = trio.Event()
        self._answer: Answer | None = None
        self.error: EngineError | None = None

    async def run(self, engine: EngineClient, params: SamplingParams, chat: bool) -> None:
        """Sends the prompt and follows the answer to its end."""
        prompt: Prompt = [{"role": "user", "content": self.prompt}] if chat else self.prompt
        try:
            with self._pieces:
                self._answer = await self._follow(engine, prompt, params)
        except EngineError as error:  # told when its turn to be printed comes
            self.error = error
        finally:
            self._ended.set()

    async def wait_result(self) -> Answer | Failure:
        """Waits for the whole answer, or why there is none."""
        await self._ended.wait()
        if self.error is not None:
            return Failure(prompt=self.prompt, error=str(self.error))
        assert self._answer is not None
        return self._answer

    async def _follow(self, engine: EngineClient, prompt: Prompt, params: SamplingParams) -> Answer:
        sent_s = perf_counter()
        first_s: float | None = None
        texts: list[str] = []
        token_ids: list[int] = []
        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                if first_s is None:
                    first_s = perf_counter()
                texts.append(delta.text)
                token_ids.extend(delta.token_ids)
                if delta.text:
                    await self._pieces.send(delta.text)
        ended_s = perf_counter()
        first_s = ended_s if first_s is None else first_s
        decode_s = max(ended_s - first_s, 1e-9)
        return Answer(
            prompt=self.prompt,
            text="".join(texts),
            token_ids=token_ids,
            finish_reason=str(delta.finish_reason),
            prompt_tokens=delta.num_prompt_tokens,
            completion_tokens=len(token_ids),
            ttft_s=round(first_s - sent_s, 4),
            tokens_per_s=round(max(len(token_ids) - 1, 0) / decode_s, 2),
        )
