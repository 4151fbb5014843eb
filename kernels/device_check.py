"""Checks every Triton kernel on the GPU of this machine, then times it: python kernels/device_check.py [--out FILE]

For each kernel: its value against the fp64 reference on fresh random inputs, with fresh memory poisoned; the bits of
every row in batches of 1, 2, 7, 8, 9, 32 and 256, from the front, from the back and permuted; and the median time
against what torch offers for the same, as a ratio. Meant for under 5 minutes. Exits with 1 when a value or a bit is
wrong.

`--small` takes tiny inputs. In Triton's interpreter (TRITON_INTERPRET=1, on the CPU, with --small) it checks this
script itself: a tile's product is BLAS there, whose bits change with a row's place, so bits are printed and not held
against it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]
from dspark import noise
from dspark_kernels import reference
from dspark_kernels.gpu.acceptance import acceptance, acceptance_reference
from dspark_kernels.gpu.arguments import interpreting
from dspark_kernels.gpu.attention import attention, tiles_of
from dspark_kernels.gpu.confidence import confidence, confidence_reference
from dspark_kernels.gpu.draw import gumbel_argmax, log_of
from dspark_kernels.gpu.logsoftmax import log_softmax, raw_logprob
from dspark_kernels.gpu.markov import sample, sample_reference
from dspark_kernels.gpu.matmul import linear
from dspark_kernels.gpu.norm import add_rms_norm, rms_norm
from dspark_kernels.gpu.philox import gumbel
from dspark_kernels.gpu.pointwise import rotary, silu_mul
from dspark_kernels.gpu.schedule import schedule, schedule_reference
from dspark_kernels.gpu.verify import verify, verify_reference

WIDTHS = (1, 2, 7, 8, 9, 32, 256)
TIMED = (1, 32, 256)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of the norm of the difference
Rows = dict[str, Tensor]  # inputs with one entry a row


@dataclass(frozen=True, slots=True)
class Check:
    """rows: the inputs of WIDTHS[-1] rows. run and library take some of them; the result has a row for each."""

    name: str
    rows: Rows
    run: Callable[[Rows], Tensor]
    reference: Callable[[Rows], Tensor]
    tolerance: float
    library: Callable[[Rows], object] | None = None


@dataclass(slots=True)
class Found:
    """error: norm of the difference over the norm of the reference. differing: rows whose bits changed with their
    company, of ``compared``. microseconds: {rows: [ours, library]}."""

    name: str
    error: float
    tolerance: float
    compared: int = 0
    differing: int = 0
    microseconds: dict[int, list[float | None]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance and (self.differing == 0 or interpreting())


class Inputs:
    """Random inputs on one device, from one seed; sizes of a small real model, or tiny ones."""

    def __init__(self, small: bool, seed: int):
        self.device = torch.device("cpu" if interpreting() else "cuda")
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.small, self.n = small, 3 if small else WIDTHS[-1]
        self.vocab = 301 if small else 49152

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def keys(self) -> Rows:
        return {"seeds": self.integers(2**40, self.n), "positions": self.integers(4096, self.n)}


def linears(make: Inputs) -> list[Check]:
    shapes = (
        [(70, 96), (33, 75), (301, 96)]
        if make.small
        else [(960, 576), (3072, 576), (577, 1536), (4096, 4096), (49152, 576)]
    )
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return [_linear_check(make, o, i, kind) for kind in kinds for o, i in shapes]


def _linear_check(make: Inputs, o: int, i: int, kind: torch.dtype) -> Check:
    weight = make.normal(o, i, dtype=kind)
    bias = make.normal(o, dtype=kind) if o % 2 else None  # odd ones: with bias; the vocabulary's: to fp32, an LM head
    to = torch.float32 if o == make.vocab else kind
    return Check(
        f"linear {str(kind).removeprefix('torch.')} {o}x{i}", {"x": make.normal(make.n, i, dtype=kind)},
        lambda r: linear(r["x"], weight, bias, to), lambda r: reference.linear(r["x"], weight, bias, to),
        TOLERANCE[kind] if to == kind else 1e-5, lambda r: F.linear(r["x"], weight, bias),
    )  # fmt: skip


def rowwise(make: Inputs) -> list[Check]:
    width, checks = 96 if make.small else 4096, []
    for kind in (torch.bfloat16, torch.float32):
        x, residual = make.normal(make.n, width, dtype=kind), make.normal(make.n, width, dtype=kind)
        weight, name = make.normal(width, dtype=kind), str(kind).removeprefix("torch.")
        checks.append(
            Check(
                f"rms_norm {name} {width}", {"x": x}, lambda r, w=weight: rms_norm(r["x"], w, 1e-5),
                lambda r, w=weight: reference.rms_norm(r["x"], w, 1e-5), TOLERANCE[kind],
                lambda r, w=weight: F.rms_norm(r["x"], w.shape, w, 1e-5),
            )
        )  # fmt: skip
        checks.append(
            Check(
                f"add_rms_norm {name} {width}", {"x": x, "residual": residual},
                lambda r, w=weight: torch.cat(add_rms_norm(r["x"], r["residual"], w, 1e-5), 1),
                lambda r, w=weight: torch.cat(reference.add_rms_norm(r["x"], r["residual"], w, 1e-5), 1),
                TOLERANCE[kind], lambda r, w=weight: F.rms_norm(r["x"] + r["residual"], w.shape, w, 1e-5),
            )
        )  # fmt: skip
        checks.append(
            Check(
                f"silu_mul {name} {width}", {"x": x}, lambda r: silu_mul(r["x"]),
                lambda r: reference.silu_mul(r["x"]), TOLERANCE[kind],
                lambda r: F.silu(r["x"].chunk(2, -1)[0]) * r["x"].chunk(2, -1)[1],
            )
        )  # fmt: skip
    heads, d = (2, 16) if make.small else (32, 128)
    angle = make.normal(make.n, d // 2)
    turned = {"x": make.normal(make.n, heads, d, dtype=torch.bfloat16), "cos": angle.cos(), "sin": angle.sin()}
    return [
        *checks,
        Check(
            f"rotary bfloat16 {heads}x{d}", turned, lambda r: rotary(r["x"], r["cos"], r["sin"]),
            lambda r: reference.rotary(r["x"], r["cos"], r["sin"]), TOLERANCE[torch.bfloat16],
        ),
    ]  # fmt: skip


def attentions(make: Inputs) -> list[Check]:
    """Decoding: every row its own sequence; half of them in a sliding window; a draft block as second range."""
    heads, groups, d, longest = (2, 2, 16, 40) if make.small else (8, 4, 128, 1024)
    return [_attention_check(make, heads, groups, d, longest, kind) for kind in (torch.bfloat16, torch.float32)]


def _attention_check(make: Inputs, heads: int, group: int, d: int, longest: int, kind: torch.dtype) -> Check:
    k, v = (make.normal(make.n * longest, heads, d, dtype=kind) for _ in range(2))
    k2, v2 = (make.normal(make.n * 8, heads, d, dtype=kind) for _ in range(2))
    base = torch.arange(make.n, device=make.device) * longest
    end = base + 1 + make.integers(longest, make.n)
    every_other = torch.arange(make.n, device=make.device) % 2 == 0
    window = torch.where(every_other, base, torch.maximum(base, end - longest // 10))
    rows = {
        "q": make.normal(make.n, heads * group, d, dtype=kind), "base": base, "begin": window, "end": end,
        "begin2": base // longest * 8, "end2": base // longest * 8 + 5,
    }  # fmt: skip

    def ranges(r: Rows) -> tuple:
        return (r["q"], k, v, r["begin"], r["end"], d**-0.5, k2, v2, r["begin2"], r["end2"])

    def run(r: Rows) -> Tensor:
        return attention(*ranges(r), base=r["base"], base2=r["begin2"], longest=longest, longest2=8).flatten(1)

    def library(r: Rows) -> Tensor:  # full contexts, one call: what a padded batch costs
        n = len(r["q"])
        keys, values = (t[: n * longest].view(n, longest, heads, d).transpose(1, 2) for t in (k, v))
        return F.scaled_dot_product_attention(r["q"][:, :, None], keys, values, enable_gqa=True)

    name = f"attention {str(kind).removeprefix('torch.')} {heads * group}/{heads}x{d}, {longest} + 5 keys"
    return Check(name, rows, run, lambda r: reference.attention(*ranges(r)).flatten(1), TOLERANCE[kind], library)


def prefill(make: Inputs, kind: torch.dtype) -> Found:
    """A prompt in tiles against each query alone: the same bits."""
    heads, group, d, n = (2, 2, 16, 40) if make.small else (8, 4, 128, 1000)
    q, k, v = (make.normal(n, h, d, dtype=kind) for h in (heads * group, heads, heads))
    begin, end = torch.zeros(n, dtype=torch.int64, device=make.device), torch.arange(1, n + 1, device=make.device)
    tiles = tiles_of([n], group).to(make.device)

    def tiled() -> Tensor:
        return attention(q, k, v, begin, end, d**-0.5, tiles=tiles)

    def library() -> Tensor:
        whole = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)

    got, alone = tiled(), attention(q, k, v, begin, end, d**-0.5)
    name = f"attention {str(kind).removeprefix('torch.')}, {n} tokens of a prompt in tiles"
    found = Found(name, _error(got, reference.attention(q, k, v, begin, end, d**-0.5)), TOLERANCE[kind])
    found.compared, found.differing = n, int((got != alone).flatten(1).any(1).sum())
    if not interpreting():
        found.microseconds[n] = [_time(tiled), _time(library)]
    return found


def laws(make: Inputs) -> list[Check]:
    v = make.vocab
    logits, draft = 4 * make.normal(make.n, v), 4 * make.normal(make.n, v)
    ids = torch.arange(v, device=make.device)
    return [
        Check(
            f"log_softmax {v}", {"x": logits}, lambda r: log_softmax(r["x"]),
            lambda r: reference.log_softmax(r["x"]), 1e-6, lambda r: F.log_softmax(r["x"], -1),
        ),
        Check(
            f"raw_logprob {v}", {"x": logits, "ids": make.integers(v, make.n)},
            lambda r: raw_logprob(r["x"], r["ids"])[:, None],
            lambda r: reference.raw_logprob(r["x"], r["ids"])[:, None], 1e-6,
            lambda r: F.log_softmax(r["x"], -1).gather(-1, r["ids"][:, None]),
        ),
        Check(
            f"gumbel noise {v}, bits of the CPU", make.keys(), lambda r: gumbel(r["seeds"], 0, r["positions"], ids),
            lambda r: noise.gumbel(r["seeds"].cpu(), 0, r["positions"].cpu(), ids.cpu()).to(make.device), 0.0,
        ),
        Check(
            f"keyed draw {v}", {"p": logits.softmax(-1), **make.keys()},
            lambda r: gumbel_argmax(r["p"], r["seeds"], 0, r["positions"])[:, None],
            lambda r: (r["p"].log() + gumbel(r["seeds"], 0, r["positions"], ids)).argmax(-1, keepdim=True), 0.0,
            lambda r: (r["p"].log() - torch.empty_like(r["p"]).exponential_().log()).argmax(-1),
        ),
        Check(
            f"log_of {v}", {"p": logits.softmax(-1), "ids": make.integers(v, make.n)},
            lambda r: log_of(r["p"], r["ids"])[:, None], lambda r: reference.log_of(r["p"], r["ids"])[:, None], 1e-6,
        ),
        Check(
            f"acceptance {v}", {"p": logits, "q": draft}, lambda r: acceptance(r["p"], r["q"])[:, None],
            lambda r: acceptance_reference(r["p"], r["q"])[:, None], 1e-5,
            lambda r: torch.minimum(r["p"].softmax(-1), r["q"].softmax(-1)).sum(-1),
        ),
        Check(
            f"acceptance gradient {v}", {"p": logits, "q": draft}, lambda r: _slope(acceptance, r),
            lambda r: _slope(acceptance_reference, r), 1e-4,
            lambda r: _slope(lambda p, q: torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1), r),
        ),
    ]  # fmt: skip


def _slope(rate: Callable[[Tensor, Tensor], Tensor], r: Rows) -> Tensor:
    q = r["q"].detach().requires_grad_()
    return torch.autograd.grad(rate(r["p"], q).sum(), q)[0]


def drafts(make: Inputs) -> list[Check]:
    v, rank, width = make.vocab, 16 if make.small else 256, 96 if make.small else 4096
    kind = torch.bfloat16
    w1, w2 = make.normal(v, rank, dtype=kind), make.normal(v, rank, dtype=kind)
    heat = torch.where(make.integers(3, make.n) == 0, 0.0, 1.0)
    rows = {"base": make.normal(make.n, v), "previous": make.integers(v, make.n), "heat": heat, **make.keys()}
    keys = ("base", "previous", "heat", "seeds", "positions")
    hidden, embedding = make.normal(make.n, width, dtype=kind), make.normal(make.n, rank, dtype=kind)
    weight, bias, temperature = make.normal(width + rank, dtype=kind), make.normal(1, dtype=kind), make.normal(5).exp()

    def call(f: Callable, r: Rows) -> tuple[Tensor, Tensor]:
        base, previous, heat, seeds, positions = (r[key] for key in keys)
        return f(base, w1, w2, previous, heat, seeds, 1, positions, store_logits=True)

    def unfused(r: Rows) -> Tensor:  # with noise that costs less than keyed noise
        logits = r["base"] + (w1[r["previous"]] @ w2.T).float()
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)

    return [
        Check(
            f"markov step, logits {v} r{rank}", rows,
            lambda r: call(sample, r)[1], lambda r: call(sample_reference, r)[1],
            1e-5, unfused,
        ),
        Check(
            f"markov step, tokens {v} r{rank}", rows, lambda r: call(sample, r)[0][:, None],
            lambda r: call(sample_reference, r)[0][:, None], 0.0,
        ),
        Check(
            f"confidence {width}+{rank}", {"h": hidden, "e": embedding, "slot": make.integers(5, make.n)},
            lambda r: confidence(r["h"], r["e"], weight, bias, temperature, r["slot"])[:, None],
            lambda r: confidence_reference(r["h"], r["e"], weight, bias, temperature, r["slot"])[:, None], 1e-5,
            lambda r: torch.sigmoid(torch.cat((r["h"], r["e"]), 1) @ weight + bias),
        ),
    ]  # fmt: skip


def verifying(make: Inputs) -> Check:
    """A row is a request of five drafts: six target laws, five draft laws."""
    v, n = make.vocab, make.n
    target, draft = (2 * make.normal(n, slots, v) for slots in (6, 5))
    draft = draft + 2 * target[:, :5]
    rows = {
        "p": target.softmax(-1), "q": draft.softmax(-1), "x": draft.argmax(-1),
        "seeds": make.integers(2**40, n, 1).expand(n, 6).contiguous(), "positions": make.integers(4096, n, 6),
    }  # fmt: skip

    def call(f: Callable, r: Rows) -> Tensor:
        offsets = torch.arange(len(r["p"]) + 1, device=make.device) * 6
        accepted, tokens = f(
            *(r[k].flatten(0, 1) for k in ("p", "q", "x")), offsets, *(r[k].flatten() for k in ("seeds", "positions"))
        )
        return torch.stack((accepted, tokens), 1)

    return Check(f"verify 5 drafts {v}", rows, lambda r: call(verify, r), lambda r: call(verify_reference, r), 0.0)


def scheduling(make: Inputs) -> Found:
    """Not row by row: the whole answer against the reference."""
    n, k = (5, 3) if make.small else (256, 7)
    survival, rate = make.normal(n, k).sigmoid().cumprod(1), 1000 / (1 + torch.arange(n * (k + 1) + 1.0) / 64).ceil()
    rate = rate.to(make.device)
    wrong = sum(
        int((schedule(survival, rate, policy) != schedule_reference(survival, rate, policy)).sum())
        for policy in ("global", "early_stop")
    )
    found = Found(f"schedule {n}x{k}", float(wrong), 0.0, compared=2 * n)
    if not interpreting():
        found.microseconds[n] = [_time(lambda: schedule(survival, rate, "global")), None]
    return found


def examine(check: Check) -> Found:
    """Value, then bits in other company, then time."""
    whole, n = check.run(check.rows), len(next(iter(check.rows.values())))
    found = Found(check.name, _error(whole, check.reference(check.rows)), check.tolerance)
    for width in WIDTHS:
        if width <= n:
            order = torch.randperm(n, device=whole.device)[:width]
            for rows in (
                torch.arange(width, device=whole.device),
                torch.arange(n - width, n, device=whole.device),
                order,
            ):
                got = check.run({key: tensor[rows].contiguous() for key, tensor in check.rows.items()})
                found.compared += width
                found.differing += int((got != whole[rows]).flatten(1).any(1).sum())
    if not interpreting():
        found.microseconds = {width: _times(check, width) for width in TIMED if width <= n}
    return found


def _times(check: Check, width: int) -> list[float | None]:
    some = {key: tensor[:width].contiguous() for key, tensor in check.rows.items()}
    theirs = _time(lambda: check.library(some)) if check.library else None
    return [_time(lambda: check.run(some)), theirs]


def _error(got: Tensor, truth: Tensor) -> float:
    """Of the norms, in fp64; infinite when an element was not written or is not finite where it should be."""
    got, truth = got.double(), truth.double()
    if bool((got.isnan() & ~truth.isnan()).any()):
        return float("inf")
    return float((got - truth).norm() / truth.norm().clamp_min(1e-30))


def _time(call: Callable[[], object]) -> float:
    """Median microseconds, with the L2 cache flushed between calls and fresh memory left as it is."""
    torch.use_deterministic_algorithms(False)
    try:
        return 1000 * triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median")
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def run(small: bool, seed: int) -> list[Found]:
    make = Inputs(small, seed)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with NaN
    makers = (linears, rowwise, attentions, laws, drafts, lambda make: [verifying(make)])
    found = []
    for maker in makers:
        for check in maker(make):
            found.append(examine(check))
            print(_line(found[-1]), flush=True)
    for one in (*(prefill(make, kind) for kind in (torch.bfloat16, torch.float32)), scheduling(make)):
        found.append(one)
        print(_line(one), flush=True)
    return found


def _line(one: Found) -> str:
    pairs = ((n, a, b) for n, (a, b) in one.microseconds.items() if a is not None)
    times = "  ".join(f"{n}: {a:.0f}" + (f"/{b:.0f}={a / b:.2f}" if b else "") for n, a, b in pairs)
    mark = "ok  " if one.ok else "FAIL"
    return f"{mark} {one.name:<44} error {one.error:8.1e}  differ {one.differing}/{one.compared}  {times}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny inputs")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**31, help="of the inputs (default: the clock)")
    parser.add_argument("--out", type=Path, help="write the table as JSON")
    args = parser.parse_args()
    if not interpreting() and not torch.cuda.is_available():
        print("error: expected a CUDA device, but found none. TRITON_INTERPRET=1 with --small runs on the CPU.")
        return 2
    card = "Triton's interpreter" if interpreting() else torch.cuda.get_device_name(0)
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}; seed {args.seed}; us ours/library at rows")
    found = run(args.small, args.seed)
    if args.out:
        facts = {"card": card, "torch": torch.__version__, "triton": triton.__version__, "seed": args.seed}
        args.out.write_text(json.dumps({**facts, "checks": [asdict(one) | {"ok": one.ok} for one in found]}, indent=1))
    failed = [one.name for one in found if not one.ok]
    print(
        f"{len(found) - len(failed)} of {len(found)} checks passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
