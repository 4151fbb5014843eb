"""All randomness of the package: a pure function of (seed, stream, position, token id), and nothing else.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) with
    key     = the 64-bit sequence seed (low word, high word)
    counter = (token_id // 4, position, stream, 0);  the token's word is number token_id % 4
    k       = word >> 9 (23 bits),  u = (k + 0.5) / 2^23, exact in fp32 and never 0 or 1
    gumbel  = -ln(-ln u), with ``log_fp32`` below: plain multiplies and adds, so the C kernels give the same bits.
There is no generator state; noise is indexed by token id, never by rank, so a truncated or reduced vocabulary sees
the same noise. These are the torch references; the fast path is ``dspark.ops.gumbel_argmax``. Plain int64 tensor
code on purpose: 32-bit words are kept in int64 because torch lacks unsigned multiplies.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

RNG_SCHEME = "philox4x32-10/1"
RNG_SCHEME_REJECTION = "philox4x32-10/2"  # the drafts' stream is their slot's own
TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3  # streams

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_LOG_COEFFICIENTS = (  # Cephes logf, highest power first
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip


def draft_stream(slot: int) -> int:
    """The stream that the rejection verifier's draft of a slot (0 ...) is drawn with.

    A position is drafted again in every round until it is decided. With one stream for all of them a later round would
    repeat the noise of an earlier one, and a budget chosen from the earlier one's confidences (lagged_global) would
    know what is drafted now. Position and slot name the round.
    """
    return DRAFT | slot << 8


def rng_scheme(verifier: str) -> str:
    """The name of how randomness is keyed, for manifests."""
    return RNG_SCHEME_REJECTION if verifier == "rejection" else RNG_SCHEME


def derive_seed(run_seed: int, prompt_hash: str, sample_index: int) -> int:
    """The sequence seed of one sample of one prompt, in [0, 2**63): sha256 of the three, independent of order."""
    digest = hashlib.sha256(f"{run_seed}\0{prompt_hash}\0{sample_index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _mul_wide(a: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * m, for a holding 32-bit words in int64; split so that nothing overflows."""
    low, high = (a & 0xFFFF) * m, (a >> 16) * m
    middle = high + (low >> 16)
    return (middle >> 16) & _MASK, ((middle << 16) | (low & 0xFFFF)) & _MASK


def philox_block(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox-4x32 on broadcastable int64 tensors holding 32-bit words; the four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _mul_wide(c0, _M0)
        high1, low1 = _mul_wide(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox(seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    """The 32-bit words (in int64) of (seed, stream, position, token id); the arguments broadcast, all int64."""
    zero = torch.zeros((), dtype=torch.int64)
    counter = (token_ids >> 2, positions & _MASK, zero + stream, zero)
    words = philox_block(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    words = torch.broadcast_tensors(*words, token_ids)
    return torch.stack(words[:4]).gather(0, (words[4] & 3)[None])[0]


def unit(words: Tensor) -> Tensor:
    """32-bit words -> fp32 in (0, 1): the top 23 bits, centred in their cell."""
    return ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23


def log_fp32(x: Tensor) -> Tensor:
    """ln x of positive normal fp32, within 1 ulp; the same operations in the same order as vlog in cpu/vec.h."""
    bits = x.view(torch.int32)
    m = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)
    small = m < 0.707106781186547524
    exponent = ((bits >> 23) - 126 - small.to(torch.int32)).to(torch.float32)
    m = torch.where(small, m + m, m) - 1.0
    z = m * m
    y = m * _LOG_COEFFICIENTS[0] + _LOG_COEFFICIENTS[1]
    for coefficient in _LOG_COEFFICIENTS[2:]:
        y = y * m + coefficient
    y = y * m * z
    y = y - exponent * 2.12194440e-4
    y = y - z * 0.5
    return (m + y) + exponent * 0.693359375


def gumbel(seeds: Tensor, stream: int, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Gumbel(0, 1) noise, fp32, in [-2.82, 16.64]: seeds[N], positions[N] int64, token_ids[V] -> [N, V]."""
    return -log_fp32(-log_fp32(unit(philox(seeds[:, None], stream, positions[:, None], token_ids[None, :]))))


def uniform(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """Uniform (0, 1), fp32: seeds[N], positions[N] int64 -> [N]. The word of token id 0."""
    return unit(philox(seeds, stream, positions, torch.zeros_like(seeds)))
