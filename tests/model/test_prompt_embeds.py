"""Prompts of embeddings: as good as their tokens, and as transformers computes any others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.model.decoding import CPU, GREEDY, Collecting, PlanDriver, load_decoder
from tests.model.tiny_models import make_hf_folder
from trio_engine.checkpoint import ModelFiles
from trio_engine.errors import RequestStepError
from trio_engine.model.kv_cache import KVCache, KVCacheShape
from trio_engine.model.runner import ModelRunner
from trio_engine.sampling_params import SamplingParams
from trio_engine.tensors import TensorData

if TYPE_CHECKING:
    from trio_engine.model.decoder import Decoder

BLOCK_SIZE = 4
NUM_BLOCKS = 200
HIDDEN = 64
PROMPT = [5, 90, 17, 17, 3, 66, 41, 8, 120, 9, 77]
NUM_TOKENS = 6


class Model:
    """A tiny model and its reference."""

    def __init__(self, decoder: Decoder, reference: Any) -> None:
        self.decoder = decoder
        self.table: torch.Tensor = reference.get_input_embeddings().weight.detach()
        self._reference = reference

    def drive(self, *, launches_ahead: bool = False) -> PlanDriver:
        shape = KVCacheShape.of(self.decoder.config, BLOCK_SIZE, self.decoder.dtype)
        cache = KVCache(shape, NUM_BLOCKS, CPU, self.decoder.dtype)
        runner = ModelRunner(
            self.decoder, cache, max_num_seqs=4, max_model_len=64, launches_ahead=launches_ahead
        )
        return PlanDriver(Collecting(runner), NUM_BLOCKS, BLOCK_SIZE)

    @torch.inference_mode()
    def greedy_after(self, embeds: torch.Tensor, num_tokens: int) -> list[int]:
        """Transformers' tokens after embeddings ``[num_prompt, hidden]``."""
        output: list[int] = []
        for _ in range(num_tokens):
            whole = torch.cat([embeds, self.table[output]])
            output.append(int(self._reference(inputs_embeds=whole[None]).logits[0, -1].argmax()))
        return output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder, reference = make_hf_folder("qwen2", tmp_path_factory.mktemp("qwen2"))
    return Model(load_decoder(ModelFiles("folder", folder)), reference)


def data_of(embeds: torch.Tensor) -> TensorData:
    array: np.ndarray[Any, Any] = embeds.contiguous().numpy()
    return TensorData.from_numpy(array)


def generate(
    driver: PlanDriver, chunks: list[int], params: SamplingParams = GREEDY, **fields: Any
) -> list[int]:
    """One row's output, its prompt of zeros unless ``token_ids`` says otherwise."""
    token_ids = fields.pop("token_ids", [0] * len(PROMPT))
    driver.add(1, token_ids, params, room=NUM_TOKENS, **fields)
    steps = [driver.step({1: count}) for count in chunks + [1] * (NUM_TOKENS - 1)]
    driver.finish(1)
    return [step[1] for step in steps if step]


CHUNKS = [[11], [4, 7], [1] * 11, [8, 3]]


@pytest.mark.parametrize("launches_ahead", [False, True], ids=["settled", "ahead"])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_embeddings_of_tokens_give_what_the_tokens_give(
    model: Model, chunks: list[int], launches_ahead: bool
) -> None:
    driver = model.drive(launches_ahead=launches_ahead)
    wanted = generate(driver, chunks, token_ids=PROMPT)
    assert generate(driver, chunks, prompt_embeds=data_of(model.table[PROMPT])) == wanted


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_embeddings_of_no_token_give_what_transformers_gives(
    model: Model, chunks: list[int]
) -> None:
    embeds = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(2)) / 5
    wanted = model.greedy_after(embeds, NUM_TOKENS)
    assert generate(model.drive(), chunks, prompt_embeds=data_of(embeds)) == wanted


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_in_a_mixed_prompt_each_position_has_its_own_kind(model: Model, chunks: list[int]) -> None:
    embeds = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(3)) / 5
    is_token = [position % 3 != 1 for position in range(len(PROMPT))]
    whole = torch.where(torch.tensor(is_token)[:, None], model.table[PROMPT], embeds)
    found = generate(
        model.drive(),
        chunks,
        token_ids=[id_ if is_id else 0 for id_, is_id in zip(PROMPT, is_token, strict=True)],
        prompt_embeds=data_of(embeds),
        prompt_is_token_ids=is_token,
    )
    assert found == model.greedy_after(whole, NUM_TOKENS)


def test_rows_of_both_kinds_share_a_batch(model: Model) -> None:
    embeds = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(4)) / 5
    driver = model.drive()
    driver.add(0, PROMPT, GREEDY, room=NUM_TOKENS)
    driver.add(2, [0] * 11, GREEDY, room=NUM_TOKENS, prompt_embeds=data_of(embeds))
    driver.add(3, PROMPT[:5], GREEDY, room=NUM_TOKENS)
    outputs: dict[int, list[int]] = {0: [], 2: [], 3: []}
    for counts in ({2: 6, 0: 4}, {0: 7, 3: 5, 2: 5}, *[{0: 1, 2: 1, 3: 1}] * (NUM_TOKENS - 1)):
        for slot, token_id in driver.step(counts).items():
            outputs[slot].append(token_id)
    assert outputs == {
        0: model.greedy_after(model.table[PROMPT], NUM_TOKENS),
        2: model.greedy_after(embeds, NUM_TOKENS),
        3: model.greedy_after(model.table[PROMPT[:5]], NUM_TOKENS),
    }


def test_a_resumed_row_computes_its_embeddings_again(model: Model) -> None:
    embeds = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(5)) / 5
    wanted = model.greedy_after(embeds, NUM_TOKENS)
    driver = model.drive()
    driver.add(
        1,
        [0] * len(PROMPT) + wanted[:2],
        GREEDY,
        room=NUM_TOKENS,
        num_prompt_tokens=len(PROMPT),
        prompt_embeds=data_of(embeds),
    )
    steps = [driver.step({1: count}) for count in (7, 6, 1, 1, 1)]
    assert [step[1] for step in steps if step] == wanted[2:]


def test_a_slot_s_next_row_has_no_embeddings(model: Model) -> None:
    embeds = torch.randn(len(PROMPT), HIDDEN, generator=torch.Generator().manual_seed(6))
    driver = model.drive()
    wanted = generate(driver, [11], token_ids=PROMPT)
    for how in ("finish", "set up again", "reset"):
        driver.add(1, [0] * 11, GREEDY, room=NUM_TOKENS, prompt_embeds=data_of(embeds))
        driver.step({1: 4})  # and never the rest
        if how == "finish":
            driver.finish(1)
        elif how == "reset":
            driver.reset()
        assert generate(driver, [11], token_ids=PROMPT) == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_floats_are_taken(model: Model, dtype: torch.dtype) -> None:
    half = (torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(7)) / 5).to(dtype)
    data = half.view(torch.uint8).numpy().tobytes()
    tensor = TensorData(str(dtype).removeprefix("torch."), (11, HIDDEN), data)
    wanted = model.greedy_after(half.float(), NUM_TOKENS)
    assert generate(model.drive(), [11], prompt_embeds=tensor) == wanted


def test_an_embedding_is_no_token_to_be_penalized(model: Model) -> None:
    """The place of an embedding holds id 0, which the row has never had."""
    embeds = data_of(model.table[PROMPT])
    greedy = generate(model.drive(), [11], prompt_embeds=embeds)
    free: dict[str, Any] = {"temperature": 0.0, "max_tokens": None, "logit_bias": {0: 1e4}}
    plain = generate(model.drive(), [11], SamplingParams(**free), prompt_embeds=embeds)
    params = SamplingParams(**free, repetition_penalty=1e5)
    penalized = generate(model.drive(), [11], params, prompt_embeds=embeds)
    assert plain == [0] * NUM_TOKENS
    assert penalized[0] == 0
    assert penalized[1] != 0
    is_token = [position == 4 for position in range(11)]
    mixed = generate(
        model.drive(), [11], params, prompt_embeds=embeds, prompt_is_token_ids=is_token
    )
    assert mixed[0] != 0
    assert greedy[0] != 0


def test_embeddings_of_another_size_are_their_rows_fault(model: Model) -> None:
    for shape in ((11, HIDDEN + 1), (10, HIDDEN)):
        driver = model.drive()
        driver.add(
            0, [0] * 11, GREEDY, room=2, prompt_embeds=TensorData.from_numpy(np.zeros(shape))
        )
        with pytest.raises(RequestStepError, match=r"request-0: prompt_embeds .*not \[11, 64\]"):
            driver.step({0: 11})
