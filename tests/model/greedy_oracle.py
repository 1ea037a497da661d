"""Greedy text of the built-in model against transformers' on the same file.

The rule of comparison: at the first token that differs, transformers' own two best logits after
that very prefix must lie within ``TIE_GAP`` of each other, and the comparison of that sequence
ends there; at most ``MAX_TIES`` of the sequences may end so.
"""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
import pytest
import torch

from trio_engine.checkpoint import locate_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_TOKENS = 48
TIE_GAP = 1e-3
MAX_TIES = 2

# Chat turns, plain text, code, lists, other scripts, one word, and long ones: 1 to 500 tokens.
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List five prime numbers and say why 1 is not among them.",
    "Translate to Spanish: The library closes at nine o'clock.",
    "A train leaves at 14:05 and arrives at 16:50. How long does it take?",
    "Give me three names for a grey cat.",
    "Who wrote Pride and Prejudice, and when?",
    "Fix the grammar: She don't likes apples and him neither.",
    "Summarize: " + "The committee met twice and agreed on nothing but lunch. " * 12,
)
TEXTS = (
    "The",
    "Once upon a time, in a village by the river,",
    "def fibonacci(n: int) -> int:\n    ",
    '{"name": "Ada", "born": 1815, "languages": [',
    "SELECT name, COUNT(*) FROM orders",
    "1, 1, 2, 3, 5, 8, 13,",
    "La révolution française a commencé en",
    "Die Würde des Menschen ist",
    "東京は日本の首都で、",
    "In the beginning there was a list of words: "
    + " ".join(f"word{number}" for number in range(120))
    + ". It went on:",
)


class Comparison(NamedTuple):
    """One sequence against transformers.

    Attributes:
        num_equal: leading tokens that are equal.
        gap: between transformers' two best logits where they part; None if they never do.
    """

    num_equal: int
    gap: float | None


class GreedyOracle:
    """Transformers on the file of a built-in or local GGUF model, in float32.

    Args:
        model: as the option of the engine.
    """

    def __init__(self, model: str = "smollm2") -> None:
        path = locate_model(model).path
        self._tokenizer = load_pretrained("AutoTokenizer", path)
        self._model = load_pretrained("AutoModelForCausalLM", path, dtype=torch.float32).eval()

    def prompts(self) -> list[list[int]]:
        """Token ids of all twenty prompts: chat turns first, then texts to go on with."""
        chats = [
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
            for prompt in PROMPTS
        ]
        return chats + [self._tokenizer(text)["input_ids"] for text in TEXTS]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @torch.inference_mode()
    def compare(self, prompt: Sequence[int], output: Sequence[int]) -> Comparison:
        """Looks at the whole sequence at once: what is greedy after each prefix of it."""
        start = len(prompt) - 1
        sequence = torch.tensor([[*prompt, *output[:-1]]])
        logits = self._model(sequence, logits_to_keep=len(output)).logits[0].float()
        assert sequence.shape[1] - logits.shape[0] == start
        differs = logits.argmax(-1) != torch.tensor(output)
        if not differs.any():
            return Comparison(len(output), None)
        first = int(differs.int().argmax())
        best, second = logits[first].topk(2).values.tolist()
        return Comparison(first, best - second)

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Log probabilities ``[num_tokens, vocab]`` of what follows each token."""
        logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits.float().log_softmax(-1)

    def check(self, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        """Applies the rule to sequences.

        Raises:
            AssertionError: they part where transformers was sure, or too many part.
        """
        pairs = zip(prompts, outputs, strict=True)
        parted = {
            index: comparison
            for index, (prompt, output) in enumerate(pairs)
            if (comparison := self.compare(prompt, output)).gap is not None
        }
        wrong = {i: c for i, c in parted.items() if c.gap is None or c.gap > TIE_GAP}
        assert not wrong, f"sequences that part from transformers without a tie: {wrong}"
        assert len(parted) <= MAX_TIES, f"too many ties: {parted}"


def load_pretrained(class_name: str, path: Path, **options: Any) -> Any:
    """An object of transformers', made of one GGUF file."""
    import transformers

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # transformers' own, about its GGUF reader
        patch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would be left behind
        # It makes this table of names anew for every module of the model: a minute in all.
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        source = getattr(transformers, class_name)
        return source.from_pretrained(path.parent, gguf_file=path.name, **options)
