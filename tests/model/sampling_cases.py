"""Sampling options for tests, each with a name; token ids suit a vocabulary of 128.

Few allowed tokens make words, repetitions and stops happen.
"""

from __future__ import annotations

from typing import Any

from trio_engine.sampling_params import RepetitionDetectionParams, SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}
FEW = [5, 6, 7, 8]

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seed": {"seed": 3},
    "temperature": {"seed": 4, "temperature": 0.4},
    "top_k": {"seed": 5, "top_k": 7},
    "top_p": {"seed": 6, "top_p": 0.7},
    "min_p": {"seed": 7, "min_p": 0.1},
    "all cuts": {"seed": 8, "temperature": 1.3, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.8},
    "repetition favoured": {"seed": 9, "repetition_penalty": 0.7},
    "frequency_penalty": {**GREEDY, "frequency_penalty": 0.9},
    "presence_penalty": {**GREEDY, "presence_penalty": 1.5},
    "frequency favoured": {**GREEDY, "frequency_penalty": -0.5, "allowed_token_ids": FEW},
    "all penalties": {
        "seed": -10,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "top_p": 0.9,
    },
    "logit_bias": {**GREEDY, "logit_bias": {5: 4.0, 6: 3.5, 7: -100.0, 127: 3.0}},
    "allowed_token_ids": {"seed": 11, "allowed_token_ids": [*FEW, 127, 0]},
    "bad words": {**GREEDY, "allowed_token_ids": FEW, "bad_words_token_ids": [[5, 6], [8]]},
    "long bad words": {
        "seed": 12,
        "allowed_token_ids": FEW,
        "bad_words_token_ids": [[5, 5], [6, 7, 8], [6, 6, 6], [7, 8, 5, 6], [8, 8], [7, 7]],
    },
    "min_tokens": {
        "seed": 13,
        "allowed_token_ids": FEW,
        "stop_token_ids": [5],
        "eos_token_id": 6,
        "logit_bias": {5: 30.0, 6: 30.0},
        "min_tokens": 7,
    },
    "stop_token_ids": {
        "seed": 19,
        "allowed_token_ids": [*FEW, 9, 10],
        "stop_token_ids": [9],
        "eos_token_id": 10,
    },
    "repetition_detection": {
        **GREEDY,
        "allowed_token_ids": FEW,
        "bad_words_token_ids": [[5, 5], [6, 6], [7, 7], [8, 8]],
        "repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3),
    },
    "logprobs 0": {**GREEDY, "logprobs": 0},
    "logprobs": {"seed": 14, "top_k": 3, "logprobs": 5},
    "all logprobs": {"seed": 15, "temperature": 2.0, "logprobs": -1},
    "logprobs beside edits": {
        "seed": 16,
        "logprobs": 4,
        "logit_bias": {5: 5.0},
        "presence_penalty": 1.0,
        "bad_words_token_ids": [[9]],
    },
    "logprob_token_ids": {**GREEDY, "logprob_token_ids": [127, 0, 64, 64]},
    "prompt_logprobs 0": {**GREEDY, "prompt_logprobs": 0},
    "prompt_logprobs": {"seed": 17, "prompt_logprobs": 3, "logprobs": 1},
    "all prompt_logprobs": {**GREEDY, "prompt_logprobs": -1},
    "everything": {
        "seed": 18,
        "temperature": 0.9,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": -0.3,
        "allowed_token_ids": list(range(100)),
        "bad_words_token_ids": [[5], [6, 7], [8, 9, 10]],
        "logit_bias": {11: 2.0, 12: -3.0},
        "min_tokens": 5,
        "stop_token_ids": [20, 21],
        "logprobs": 2,
        "prompt_logprobs": 2,
    },
}


def params_of(name: str, **more: Any) -> SamplingParams:
    """The named options; without a limit of tokens unless ``more`` has one."""
    return SamplingParams(**{"max_tokens": None, **OPTIONS[name], **more})
