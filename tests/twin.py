"""The default model as transformers itself reads its GGUF, in float32 on the CPU, without our loader and our layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from engine.gguf_file import GgufFile


class _Linear(torch.nn.Linear):
    """One row as two columns: torch's product with a vector reads the weights at half the rate."""

    def reset_parameters(self) -> None:
        """They are all loaded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.bias is None
        if x.numel() != self.in_features:
            return super().forward(x)
        return (self.weight @ x.reshape(1, -1).repeat(2, 1).T)[:, 0].view(*x.shape[:-1], -1)


def twin_of(path: Path) -> transformers.LlamaForCausalLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", GgufFile)
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))  # asked for each module
        patch.setattr(torch.nn, "Linear", _Linear)
        settings = dict(load_gguf_checkpoint(str(path))["config"]) | {"tie_word_embeddings": True}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in read["tensors"].items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()
