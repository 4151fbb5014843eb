# mypy: disable-error-code="no-untyped-def"
"""How many drafts of each request go to the target: survival sort and budget search on the device, no host sync.

    Theta(n) = (R + sum of the n largest survivals) rate[R + n],  n = 0 .. number of drafts, R + n <= B_max
Pairs (r, j) are admitted by descending survival, equal ones by ascending r K + j, so what is admitted of a request is a
prefix of its block. ``global`` takes the n with the largest Theta, the first of equals; ``early_stop`` stops before the
first n whose Theta is lower than the one before. (Decision rule: shared/DESIGN.md 5.)

One program. A pair is one int64 key: the survival's fp32 bits (ordered like the numbers, as these are >= 0), then its
place counted from the end; keys differ, so a sort has one answer. Survivals are summed as integers, in units of 2^-48
(what is smaller is dropped), so the order of the sum cannot matter; Theta is one fp64 product of the sum and the rate.
The result is a pure function of its arguments, on every device. It depends on all requests, by nature.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark_kernels.gpu.aot import Case
from dspark_kernels.gpu.arguments import FP32, check, matrix

POLICIES = ("global", "early_stop")
MAX_PAIRS = 4096  # after both R and K are padded to powers of two
UNIT = tl.constexpr(2.0**48)  # 4096 requests and 4096 survivals sum to at most 2^61


@triton.jit
def _keys(survival, requests, k, R: tl.constexpr, K: tl.constexpr):
    """[R, K] int64 keys, larger = admitted earlier; -1 where there is no draft."""
    r, j = tl.arange(0, R)[:, None], tl.arange(0, K)[None, :]
    value = tl.load(survival + r * k + j, mask=(r < requests) & (j < k), other=-1.0)
    bits = tl.where(value > 0.0, value, 0.0).to(tl.int32, bitcast=True).to(tl.int64)  # -0 too sorts as 0
    return tl.where(value >= 0.0, (bits << 32) | (R * K - 1 - (r * K + j)), -1)


@triton.jit
def _budget(amount, live, rate, requests, N: tl.constexpr, EARLY: tl.constexpr):
    """How many pairs to admit. amount [N]: survivals in order, in units; live [N]: drafts that the table has room for,
    a prefix."""
    n = tl.arange(0, N)
    total = tl.cumsum(amount, axis=0) + (requests.to(tl.float64) * UNIT).to(tl.int64)
    faster = tl.load(rate + requests + n, mask=live, other=0.0).to(tl.float64)
    before = (total - amount).to(tl.float64) * faster
    theta = total.to(tl.float64) * tl.load(rate + requests + n + 1, mask=live, other=0.0).to(tl.float64)
    if EARLY:
        return tl.min(tl.where((theta < before) | ~live, n, N), axis=0)
    theta = tl.where(live, theta, float("-inf"))
    best, at = tl.max(theta, axis=0, return_indices=True)
    none = tl.max(tl.where(n == 0, before, float("-inf")), axis=0)
    return tl.where(best > none, at + 1, 0)


@triton.jit(do_not_specialize=["requests", "k", "limit"])
def _schedule(
    survival, rate, lengths, requests, k, limit, R: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    keys = _keys(survival, requests, k, R, K)
    ranked = tl.sort(tl.reshape(keys, (R * K,)), descending=True)
    n = tl.arange(0, R * K)
    value = tl.where(ranked >= 0, ranked >> 32, 0).to(tl.int32).to(tl.float32, bitcast=True)
    amount = (value.to(tl.float64) * UNIT).to(tl.int64)
    admitted = _budget(amount, (ranked >= 0) & (requests + n < limit), rate, requests, R * K, EARLY)
    last = tl.max(tl.where(n == admitted - 1, ranked, -1), axis=0)  # the key of the last pair admitted
    taken = (keys >= last) & (keys >= 0) & (admitted > 0)
    r = tl.arange(0, R)
    tl.store(lengths + r, tl.sum(taken.to(tl.int64), axis=1), mask=r < requests)


def schedule(survival: Tensor, rate: Tensor, policy: str) -> Tensor:
    """Verification lengths [R] int64.

    survival [R, K] fp32: the probability that drafts 0 .. j are all accepted, non-increasing along K, negative (-1)
    from the first missing draft on; rate [B_max + 1] fp32: steps per second with that many rows in the pass, B_max >= R
    is the most a pass may hold; policy "global" or "early_stop". Raises ValueError on other shapes, dtypes or policies,
    and on more than 4096 pairs once R and K are rounded up to powers of two.
    """
    requests, k = matrix("schedule", "survival", survival)
    check("schedule", survival=(survival, (requests, k), FP32), rate=(rate, (rate.numel(),), FP32))
    if policy not in POLICIES:
        raise ValueError(f"schedule: expected a policy of {POLICIES}, but got {policy!r}. Name one of them.")
    if rate.numel() < requests + 1:
        raise ValueError(
            f"schedule: expected a rate for every pass of up to {requests} rows and more, [B_max + 1], but got "
            f"{rate.numel()} rates. Measure a longer table, or run fewer requests."
        )
    r_padded, k_padded = triton.next_power_of_2(max(requests, 1)), triton.next_power_of_2(max(k, 1))
    if r_padded * k_padded > MAX_PAIRS:
        raise ValueError(
            f"schedule: expected at most {MAX_PAIRS} pairs, but {requests} x {k} padded to powers of two is "
            f"{r_padded * k_padded}. Schedule fewer requests at a time."
        )
    lengths = torch.zeros(requests, dtype=torch.int64, device=survival.device)
    if requests and k:
        _schedule[(1,)](
            survival, rate, lengths, requests, k, rate.numel() - 1, R=r_padded, K=k_padded,
            EARLY=policy == "early_stop", num_warps=_warps(r_padded * k_padded),
        )  # fmt: skip
    return lengths


def _warps(pairs: int) -> int:
    """Eight pairs a thread at most: with sixteen, a sort of 4096 took more than twice as long to compile."""
    return max(1, min(16, pairs // 128))


def schedule_reference(survival: Tensor, rate: Tensor, policy: str) -> Tensor:
    """The same in plain Python: integers for the sum, one fp64 product for each Theta."""
    requests, k = survival.shape
    rates, rows = rate.tolist(), survival.tolist()
    pairs = sorted((-rows[r][j], r * k + j) for r in range(requests) for j in range(k) if rows[r][j] >= 0)
    total, thetas = requests * int(UNIT.value), []
    for n in range(min(len(pairs), len(rates) - 1 - requests) + 1):
        total += int(-pairs[n - 1][0] * UNIT.value) if n else 0
        thetas.append(float(total) * rates[requests + n])
    if policy == "early_stop":
        drops = (n - 1 for n in range(1, len(thetas)) if thetas[n] < thetas[n - 1])
        admitted = next(drops, len(thetas) - 1)
    else:
        admitted = thetas.index(max(thetas))
    lengths = torch.zeros(requests, dtype=torch.int64, device=survival.device)
    for _, place in pairs[:admitted]:
        lengths[place // k] += 1
    return lengths


def _case(r: int, k: int, early: bool) -> Case:
    return Case(
        f"schedule.{r}x{k}{'.early' * early}", _schedule,
        {"survival": "*fp32", "rate": "*fp32", "lengths": "*i64", "requests": "i32", "k": "i32", "limit": "i32"},
        {"R": r, "K": k, "EARLY": early}, num_warps=_warps(r * k),
    )  # fmt: skip


AOT = [_case(1, 1, True), _case(32, 8, False), _case(32, 8, True), _case(512, 8, True)]
