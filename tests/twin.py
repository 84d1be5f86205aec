"""The default model as transformers itself reads its GGUF, in float32 on the CPU, without our loader and our layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def twin_of(path: Path) -> transformers.LlamaForCausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))  # asked for each module
        settings = dict(load_gguf_checkpoint(str(path))["config"]) | {"tie_word_embeddings": True}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in read["tensors"].items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
