"""The built-in model as a Hugging Face folder, which every program here can read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from tests.model.greedy_oracle import load_pretrained
from trio_engine.checkpoint import locate_model

if TYPE_CHECKING:
    from pathlib import Path


def write_smollm2(folder: Path) -> None:
    """Writes SmolLM2-135M-Instruct in float32, 540 MB, with its tokenizer and chat template."""
    path = locate_model("smollm2").path
    model = load_pretrained("AutoModelForCausalLM", path, dtype="float32")
    tensors = {
        name: tensor.contiguous().clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    config.pop("quantization_config", None)  # the file's, not the folder's
    (folder / "config.json").write_text(json.dumps(config))
    load_pretrained("AutoTokenizer", path).save_pretrained(folder)
