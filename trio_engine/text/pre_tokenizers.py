"""How a GGUF's vocabulary wants text cut into words before merging, by ``tokenizer.ggml.pre``.

Pure. The expressions are those of the models' own tokenizer.json; the names are llama.cpp's.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers


class WordSplit(NamedTuple):
    """How byte-level BPE cuts words, and what else llama.cpp ties to the same name.

    Attributes:
        pattern: words, as an expression; None is GPT-2's, which the library has built in.
        single_digits: cut digits apart first.
        ignores_merges: a word that is a token as it stands is taken without merging.
        adds_bos: whether BOS goes first where the file does not say.
    """

    pattern: str | None = None
    single_digits: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Makes the library's pre-tokenizer."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        use_regex = self.pattern is None
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
        return pre_tokenizers.Sequence(steps)


_ENGLISH_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CAPITALIZED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3_PATTERN = "|".join([_ENGLISH_ENDINGS, _LETTERS, r"\p{N}{1,3}", _SIGNS, _SPACES])
_QWEN2_PATTERN = "|".join([_ENGLISH_ENDINGS, _LETTERS, r"\p{N}", _SIGNS, _SPACES])
_QWEN35_PATTERN = "|".join(
    [
        _ENGLISH_ENDINGS,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _SPACES,
    ]
)
_TEKKEN_PATTERN = "|".join([_CAPITALIZED, _CAPITALS, r"\p{N}", _SIGNS_AND_SLASHES, _SPACES])
_GPT_4O_PATTERN = "|".join(
    [
        _CAPITALIZED + _ENGLISH_ENDINGS + "?",
        _CAPITALS + _ENGLISH_ENDINGS + "?",
        r"\p{N}{1,3}",
        _SIGNS_AND_SLASHES,
        _SPACES,
    ]
)

_GPT2 = WordSplit()
_SINGLE_DIGITS = WordSplit(single_digits=True)
_LLAMA3 = WordSplit(_LLAMA3_PATTERN, ignores_merges=True, adds_bos=True)
_LLAMA3_MERGING = WordSplit(_LLAMA3_PATTERN)
_QWEN2 = WordSplit(_QWEN2_PATTERN)
_QWEN35 = WordSplit(_QWEN35_PATTERN)
_TEKKEN = WordSplit(_TEKKEN_PATTERN, ignores_merges=True, adds_bos=True)
_GPT_4O = WordSplit(_GPT_4O_PATTERN)

_SPLIT_OF_NAMES = {
    "default gpt-2 gpt2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat": _GPT2,
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _SINGLE_DIGITS,
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": _LLAMA3,
    "dbrx smaug-bpe": _LLAMA3_MERGING,
    "qwen2 deepseek-r1-qwen stablelm2 kormo megrez hunyuan solar-open": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o llama4 kanana2 talkie minimax-m2": _GPT_4O,
}

WORD_SPLITS = {name: split for names, split in _SPLIT_OF_NAMES.items() for name in names.split()}
"""``tokenizer.ggml.pre`` to how words are cut; other names are not supported."""
