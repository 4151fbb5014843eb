"""Who computes what: by device and dtype, in one place, and without Triton where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.ops import cpu
from dspark.ops.backend import backend, kernels, recording
from dspark_kernels import reference

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # any import of it fails
import torch
from dspark import ops
from dspark.contracts import Request, SamplingParams
from dspark.runner import Engine
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights

config = read_config({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 32,
})
target = Target(config, random_weights(config, 1, torch.float32))
print(len(Engine(target).generate([Request((1, 2), SamplingParams(max_tokens=5))])[0].token_ids))
"""


def test_dtype_and_device_choose() -> None:
    assert backend(torch.zeros(1)) is backend(torch.zeros(1, dtype=torch.bfloat16)) is cpu
    assert backend(torch.zeros(1, dtype=torch.float64)) is reference
    assert kernels(torch.zeros(1, dtype=torch.float64)) is cpu, "noise has no fp64 form"
    with pytest.raises(DsparkError, match="on cpu or cuda, but got one on meta"):
        backend(torch.zeros(1, device="meta"))


def test_recording_looks_at_the_mode_and_at_every_tensor() -> None:
    plain, wanted = torch.zeros(1), torch.zeros(1, requires_grad=True)
    assert recording(plain, None, wanted)
    assert not recording(plain, None)
    with torch.no_grad():
        assert not recording(wanted)
    with torch.inference_mode():
        assert not recording(wanted)


def test_the_cpu_needs_no_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "5", done.stderr
