"""The kernels of this folder run in Triton's interpreter, on CPU tensors. It reads the variable when a kernel is
defined, so it must be set before any of them is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"
