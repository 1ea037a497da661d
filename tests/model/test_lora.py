"""Adapters in a batch against the same adapters merged into the weights."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.model.decoding import CPU, LogitsProbe, load_decoder
from tests.model.test_decoder_logits import assert_close, reference, token_ids
from tests.model.tiny_models import make_hf_folder, make_model
from trio_engine.checkpoint import ModelFiles
from trio_engine.config import EngineConfig
from trio_engine.errors import ModelError, RequestError
from trio_engine.executor.torch_executor import TorchExecutor
from trio_engine.model.lora import LoRAAdapters
from trio_engine.model.lora_loader import load_adapter
from trio_engine.requests import LoRARequest
from trio_engine.testing.core_driver import CoreDriver
from trio_engine.testing.requests import make_core, make_request

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trio_engine.model.decoder import Decoder
    from trio_engine.model.lora import LoRAAdapter

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def save_adapter(folder: Path, family: str, *, seed: int = 5, **options: Any) -> Any:
    """Writes a random adapter as PEFT does; returns the model with it merged in."""
    import peft

    values: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": EVERYTHING} | options
    config = peft.LoraConfig(**values)
    generator = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # PEFT's use of what transformers calls deprecated
        patch.setattr("tqdm.std.tqdm.monitor_interval", 0)  # its thread would be left behind
        model = peft.get_peft_model(make_model(family), config)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
        model.save_pretrained(str(folder), save_embedding_layers=False)
        return model.merge_and_unload()


def load(folder: Path, decoder: Decoder, lora_id: int = 1, *, max_rank: int = 16) -> LoRAAdapter:
    return load_adapter(
        str(folder), lora_id, decoder.config, max_rank=max_rank, dtype=decoder.dtype, device=CPU
    )


def tiny_decoder(family: str, folder: Path) -> Decoder:
    make_hf_folder(family, folder)
    return load_decoder(ModelFiles("folder", folder))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"target_modules": ["q_proj", "v_proj"]}),
        ("llama", {"target_modules": ["up_proj"], "use_rslora": True}),
        ("llama", {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}}),
        ("qwen3", {"target_modules": ATTENTION}),
        ("qwen2", {}),
    ],
)
def test_an_adapter_equals_its_merged_weights(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    decoder = tiny_decoder(family, tmp_path / "model")
    merged = save_adapter(tmp_path / "adapter", family, **options)
    probe = LogitsProbe(decoder)
    probe.adapters.add(load(tmp_path / "adapter", decoder))
    probe.add(0, token_ids(), lora_id=1)
    assert_close(probe.run(0, [30, 1, 39]), reference(merged, token_ids()))


def test_two_adapters_and_the_base_share_a_batch(tmp_path: Path) -> None:
    """Mixed prefill and decode steps; what the base says is the same to the last bit."""
    decoder = tiny_decoder("llama", tmp_path / "model")
    models = [make_model("llama")]
    probe = LogitsProbe(decoder)
    for lora_id in (1, 2):
        folder = tmp_path / f"adapter-{lora_id}"
        models.append(save_adapter(folder, "llama", seed=lora_id))
        probe.adapters.add(load(folder, decoder, lora_id))
    for slot in range(3):
        probe.add(slot, token_ids(seed=slot), lora_id=slot)
    steps = [{0: 5, 1: 20, 2: 1}, {2: 40, 0: 1}, {1: 1, 2: 1, 0: 1}, {0: 63, 1: 49, 2: 28}]
    parts = [probe.compute(step) for step in steps]
    for slot, model in enumerate(models):
        logits = torch.cat([part[slot] for part in parts if slot in part])
        assert_close(logits, reference(model, token_ids(seed=slot)))

    alone = LogitsProbe(decoder)
    for slot in range(3):
        alone.add(slot, token_ids(seed=slot))
    base = [alone.compute(step) for step in steps]
    assert all(torch.equal(part[0], other[0]) for part, other in zip(parts, base, strict=True))


def test_an_adapter_that_was_replaced_or_removed_is_gone(tmp_path: Path) -> None:
    decoder = tiny_decoder("llama", tmp_path / "model")
    adapters = LoRAAdapters()
    save_adapter(tmp_path / "adapter", "llama")
    adapters.add(load(tmp_path / "adapter", decoder))
    assert 1 in adapters
    adapters.remove(1)
    assert 1 not in adapters
    with pytest.raises(RequestError, match="holds no adapter 1"):
        adapters.remove(1)


@pytest.mark.parametrize(
    ("options", "max_rank", "message"),
    [
        ({"r": 8}, 4, "has rank 8, max_lora_rank is 4"),
        ({"use_dora": True}, 16, "use_dora = True: is not supported"),
        ({"target_modules": ["q_proj", "lm_head"]}, 16, "belongs to no linear layer"),
        ({"modules_to_save": ["lm_head"]}, 16, "modules_to_save"),
        ({"bias": "all"}, 16, "bias = 'all': is not supported"),
    ],
)
def test_what_no_low_rank_pair_can_say_is_refused(
    options: dict[str, Any], max_rank: int, message: str, tmp_path: Path
) -> None:
    decoder = tiny_decoder("llama", tmp_path / "model")
    save_adapter(tmp_path / "adapter", "llama", **options)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "adapter", decoder, max_rank=max_rank)


def test_another_models_adapter_is_refused(tmp_path: Path) -> None:
    decoder = tiny_decoder("llama", tmp_path / "model")
    save_adapter(tmp_path / "adapter", "qwen3")
    with pytest.raises(ModelError, match="but the model's layer is"):
        load(tmp_path / "adapter", decoder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peft_type", "IA3", "only LORA adapters"),
        ("lora_alpha", -1, "lora_alpha = -1"),
        ("alpha_pattern", {"(": 2}, "is no pattern"),
        ("alpha_pattern", [], None),
        ("alpha_pattern", [1], "is not an object"),
    ],
)
def test_a_damaged_configuration_is_named(
    key: str, value: object, message: str | None, tmp_path: Path
) -> None:
    decoder = tiny_decoder("llama", tmp_path / "model")
    save_adapter(tmp_path / "adapter", "llama")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    if message is None:
        load(tmp_path / "adapter", decoder)
        return
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "adapter", decoder)


def test_a_missing_folder_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    decoder = tiny_decoder("llama", tmp_path / "model")
    with pytest.raises(ModelError, match=r"adapter_config\.json: cannot be read"):
        load(tmp_path / "nowhere", decoder)
    save_adapter(tmp_path / "adapter", "llama")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ModelError, match="damaged or truncated"):
        load(tmp_path / "adapter", decoder)


def generate(folder: Path, asked: Sequence[tuple[str, LoRARequest | None]], **options: Any) -> Any:
    """Greedy tokens of requests that run together, by id."""
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_blocks=64, block_size=4, **options
    )
    executor = TorchExecutor(config)
    driver = CoreDriver(make_core(config, executor), executor)
    logs = {}
    for number, (request_id, adapter) in enumerate(asked):
        source = make_request(request_id, token_ids(10 + number), max_tokens=8)
        source.lora_request = adapter
        logs[request_id] = driver.listen(0, request_id)
        driver.core.add(source)
    driver.run_until_idle()
    executor.shutdown()
    return {request_id: log.token_ids for request_id, log in logs.items()}


@pytest.mark.parametrize("max_loras", [1, 2])
def test_requests_for_several_adapters_get_what_merged_weights_give(
    max_loras: int, tmp_path: Path
) -> None:
    """In one batch, or one adapter after the other where there is place for one alone."""
    model = tmp_path / "model"
    make_hf_folder("llama", model)
    asked: list[tuple[str, LoRARequest | None]] = [("base", None)]
    folders = [model]
    for lora_id in (1, 2):
        folder = tmp_path / f"adapter-{lora_id}"
        merged = save_adapter(folder, "llama", seed=lora_id)
        folders.append(tmp_path / f"merged-{lora_id}")
        merged.save_pretrained(folders[-1])
        asked.append((f"a{lora_id}", LoRARequest(f"a{lora_id}", lora_id, str(folder))))
    together = generate(model, asked, enable_lora=True, max_loras=max_loras)
    plain = [(request_id, None) for request_id, _ in asked]
    for (request_id, _), folder in zip(asked, folders, strict=True):
        assert together[request_id] == generate(folder, plain)[request_id]
    assert len({tuple(tokens) for tokens in together.values()}) == 3


def test_an_adapter_that_cannot_be_read_ends_its_request_alone(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_hf_folder("llama", model)
    asked = [("base", None), ("lost", LoRARequest("x", 1, str(tmp_path / "nowhere")))]
    together = generate(model, asked, enable_lora=True)
    assert together["lost"] == []
    assert together["base"] == generate(model, [("base", None)])["base"]
