"""The CUDA side of dspark.ops, in Triton's interpreter: the same names and arguments, errors of ours, the CPU's values.
In a process of its own: kernels are defined for the interpreter or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import inspect, torch
from dspark import ops
from dspark.contracts import DsparkError
from dspark.ops import cpu, gpu

for name in cpu.__all__:
    if name != "forget":
        ours, theirs = (list(inspect.signature(getattr(side, name)).parameters) for side in (cpu, gpu))
        assert name == "shape_probs" or ours == theirs, (name, ours, theirs)

torch.manual_seed(0)
x, w, norm = torch.randn(3, 8), torch.randn(5, 8), torch.randn(8)
close = torch.testing.assert_close
close(gpu.linear(x, w), cpu.linear(x, w))
close(gpu.rms_norm(x, norm, 1e-5), cpu.rms_norm(x, norm, 1e-5))
close(gpu.add_rms_norm(x, x, norm, 1e-5)[0], cpu.add_rms_norm(x, x, norm, 1e-5)[0])
close(gpu.silu_mul(x), cpu.silu_mul(x))
angle = torch.randn(3, 2)
close(gpu.rotary(x.view(3, 2, 4), angle.cos(), angle.sin()), cpu.rotary(x.view(3, 2, 4), angle.cos(), angle.sin()))
ids, seeds = torch.tensor([0, 7, 3]), torch.arange(3)
close(gpu.log_softmax(x), cpu.log_softmax(x))
close(gpu.raw_logprob(x, ids), cpu.raw_logprob(x, ids))
law = (torch.ones(3), torch.tensor([0, 3, 0]), torch.ones(3), torch.zeros(3))
probs = gpu.shape_probs(x, *law)
assert torch.equal(probs, cpu.shape_probs(x, *law))
assert torch.equal(gpu.log_of(probs, ids), cpu.log_of(probs, ids))
assert torch.equal(gpu.gumbel_argmax(probs, seeds, 0, seeds), cpu.gumbel_argmax(probs, seeds, 0, seeds))
assert torch.equal(gpu.uniform(seeds, 2, seeds), cpu.uniform(seeds, 2, seeds))
q, k = torch.randn(3, 4, 8), torch.randn(6, 2, 8)
begin, end = torch.tensor([0, 2, 5]), torch.tensor([2, 6, 5])
close(gpu.attention(q, k, k, begin, end, 0.3), cpu.attention(q, k, k, begin, end, 0.3))
assert torch.equal(gpu.attention(q, k, k, begin, end + 100, 0.3)[1], gpu.attention(q, k, k, begin, end, 0.3)[1])
for op, wrong in ((gpu.linear, (x, w[:, :7])), (gpu.rms_norm, (x, norm[:7], 1e-5)), (gpu.log_of, (probs, ids[:2]))):
    try:
        op(*wrong)
    except DsparkError as error:
        assert "expected" in str(error) and "got" in str(error)
    else:
        raise AssertionError("not refused")
print("all as on the CPU")
"""


def test_names_values_and_errors_are_those_of_the_cpu() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == "all as on the CPU", done.stderr
