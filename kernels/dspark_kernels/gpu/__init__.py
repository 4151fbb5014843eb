"""GPU kernels in Triton, one file per kernel. Importing this package imports triton; only ``dspark.ops`` does, and only
when it meets a CUDA tensor."""
