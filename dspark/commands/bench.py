"""Measures what the contract rests on, on this machine.

invariance counts the rows whose bits change when they are computed in other company (batch width, order, prompt chunks,
threads): for this package's operations, which must be 0, and for plain torch's, which must not be, or the sweep proves
nothing. Exits with 1 otherwise.

tax times one pass of the target with our operations over one with plain torch's, interleaved, decode and prefill.

step times a training step of the draft model at a given shape on random features (forward, losses, backward, clip,
AdamW), the losses fused and in plain torch in turn, and says what memory the process held.

metrics feeds ten million events to the streamed calibration metrics, on one thread, and times a fit of each method.

verify runs a draft model under every verifier, policy and temperature and plain decoding in turn, and says whether the
output is the same; it exits with 1 where it had to be and is not. lookup runs plain decoding, a lookup in what was
written before and, with --drafter, a draft model and both, over two epochs of several samples per prompt, with the same
check. acceptance counts recorded rounds by slot and context depth. replay says what a cut prefill of a decoder-decoder
target costs in truth, over a greedy answer's tokens, and saves in time; short prompts are joined until they are longer
than the longest suffix that is tried.

runner times plain decoding, a draft model under every verifier and, with --curve, scheduled, at several batch sizes,
with --against in turn with transformers or vLLM, and says how far each is from what the machine can read and multiply;
then requests that come over time, memory per cached token, and long contexts. It exits with 1 where an output is not
plain decoding's.

rollouts makes one rollout again and again (batch sizes, shuffled prompts, workers, threads, prompt chunks, kill -9 and
resume, the draft model) and compares the hashes of its trajectory shards; it exits with 1 where one differs.

rl times a step of RL (rollout, update) with log-probabilities that match bit for bit, with plain torch's operations
and, with --drafter, with speculative rollouts. rl-runs makes one short RL run again and again (requests in flight, kill
-9 and resume, a lookup and, with --drafter, a draft model that is frozen or follows) and compares hashes of all
rollouts and of the final policy; it exits with 1 where one differs. following puts RL runs side by side, by what they
left in history.jsonl.

Run all with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TypeVar

import torch
from tqdm import tqdm

from dspark.bench import judging, looking_up, replaying, rl_step, step, verifying
from dspark.bench.invariance import Counted, discriminating, sweep
from dspark.bench.tax import REPEATS, ROWS, Tax, tax
from dspark.commands import bench_rl, bench_rollouts, bench_runner, bench_serving
from dspark.commands.recipe_options import whole_number
from dspark.contracts import DsparkError
from dspark.target.load import EMBEDDED, load_target
from dspark.training.options import LossOptions

T = TypeVar("T")

DTYPES = ("float32", "bfloat16")
EXAMPLES = """
examples:
  dspark bench invariance
  dspark bench tax --dtype bfloat16 --rows 1 32 --json
  dspark bench verify --drafter runs/demo/bundle
  dspark bench lookup --batch 1 --limit 4
  dspark bench runner --against transformers --drafter runs/demo/bundle --curve runs/demo/curve.json
  dspark bench rollouts --drafter runs/demo/bundle
  dspark bench rl --drafter runs/demo/bundle
  dspark bench rl-runs --drafter runs/demo/bundle
  dspark bench following --runs frozen=runs/a following=runs/b --out tau.png
  dspark bench acceptance --rollouts runs/demo/events/test
  dspark bench replay --target runs/yoco/target --dtype float32
  dspark bench step --shape vocabulary=32000 anchors=32 --losses l1=0 coupled=0.9
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dspark bench`."""
    parser.add_argument("what", choices=tuple(_BENCHES), metavar="WHAT", help=f"one of {', '.join(_BENCHES)}")
    parser.add_argument("--target", default=EMBEDDED, help="the model, or whose shapes: a folder, hub id or .gguf file")
    parser.add_argument("--dtype", choices=DTYPES, help="one dtype (default: both; what runs prompts: bfloat16)")
    parser.add_argument("--rows", type=whole_number(1), nargs="+", help="rows of a pass, for tax (default: 1 8 32 128)")
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        help=f"interleaved repeats, for tax (default: {REPEATS}), step ({step.REPEATS}), "
        f"verify ({verifying.REPEATS}), lookup ({looking_up.REPEATS}), replay ({replaying.REPEATS}), "
        f"rl ({rl_step.REPEATS}), runner ({bench_serving.RunnerOptions().repeats})",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=[],
        metavar="NAME=N",
        help="for step, fields of " + ", ".join(f"{f.name}={f.default}" for f in fields(step.Shape)),
    )
    parser.add_argument("--losses", nargs="+", default=[], metavar="NAME=X", help="for step, a recipe's losses fields")
    bench_runner.add_runner_arguments(parser)
    bench_rl.add_rl_arguments(parser)
    bench_serving.add_serving_arguments(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0; 1 when our operations are not invariant or plain torch's cannot be told from them."""
    try:
        return _measure(args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was kept; the same command starts anew") from None


def _measure(args: argparse.Namespace) -> int:
    _check_options(args)
    return _BENCHES[args.what](args)


def _check_options(args: argparse.Namespace) -> None:
    """Refuses an option that would be ignored."""
    timed = ("verify", "lookup", "replay", "rl", "runner")
    belongs = {"rows": ("tax",), "repeats": ("tax", "step", *timed), "shape": ("step",), "losses": ("step",),
               "dtype": ("tax", "invariance", "rollouts", "rl-runs", *timed),
               **bench_runner.BELONGS, **bench_rl.BELONGS, **bench_serving.BELONGS}  # fmt: skip
    given = [name for name in belongs if getattr(args, name) not in (None, [])]
    foreign = [f"--{name}" for name in given if args.what not in belongs[name]]
    if foreign:
        raise DsparkError(
            f"bench {args.what}: expected options of its own, but got {', '.join(foreign)}. Leave them out."
        )


def _step(args: argparse.Namespace) -> int:
    shape = _fields(step.Shape, args.shape, "--shape")
    options = _fields(LossOptions, args.losses, "--losses")
    with tqdm(desc="step", disable=args.quiet, file=sys.stderr, leave=False) as bar:
        found = step.bench_step(shape, options, args.repeats or step.REPEATS, lambda _: bar.update())
    print(json.dumps(asdict(found)) if args.json else _step_text(found))
    return 0


def _metrics(args: argparse.Namespace) -> int:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tqdm(desc="metrics", disable=args.quiet, file=sys.stderr, leave=False) as bar:
            found = judging.bench_judging(on_batch=lambda: bar.update())
    finally:
        torch.set_num_threads(threads)
    print(json.dumps(asdict(found) | {"rate": found.rate}) if args.json else _metrics_text(found))
    return 0


def _metrics_text(found: judging.Judging) -> str:
    fits = ", ".join(f"{method} {seconds:.2f} s" for method, seconds in found.fits.items())
    return (
        f"1 thread; {found.events:,} events in {found.seconds:.2f} s: {found.rate / 1e6:.1f} million per second\n"
        f"memory: state {found.state_mib:.1f} MiB, the process' peak grew by {found.growth_mib:.1f} MiB meanwhile\n"
        f"a fit on {found.fit_rounds} rounds: {fits}"
    )


def _fields(kind: type[T], given: list[str], option: str) -> T:
    """`kind` with its fields set by NAME=VALUE. Raises DsparkError on another name or a value that is no such type."""
    known, values = asdict(kind()), {}  # type: ignore[call-overload]
    for word in given:
        name, _, text = word.partition("=")
        try:
            values[name] = type(known[name])(text)
        except (KeyError, ValueError):
            raise DsparkError(
                f"{option}: expected NAME=VALUE with a number where one belongs and a NAME of {', '.join(known)}, "
                f"but got {word!r}."
            ) from None
    return kind(**values)


def _step_text(found: step.Step) -> str:
    lines = [f"{torch.get_num_threads()} threads; lower quartile, median, upper quartile"]
    for name, (low, middle, high) in (*found.seconds.items(), ("fused / plain", found.ratio)):
        lines.append(
            f"{name:<16}{low:>10.3f}{middle:>10.3f}{high:>10.3f}{'' if name == 'fused / plain' else ' s/step'}"
        )
    lines.append(
        f"memory: {found.before_mib:.0f} MiB before the first step, {found.peak_mib:.0f} at the fused side's peak"
    )
    return "\n".join([*lines, f"gradients differ by {found.difference:.1e} of their norm"])


def _dtypes(args: argparse.Namespace) -> tuple[str, ...]:
    return (args.dtype,) if args.dtype else DTYPES


def _invariance(args: argparse.Namespace) -> int:
    found = {}
    with tqdm(desc="invariance", unit="op", disable=args.quiet, file=sys.stderr, leave=False) as bar:
        for dtype in _dtypes(args):
            found[dtype] = sweep(
                load_target(args.target, dtype), lambda name: bar.set_postfix_str(name) or bar.update()
            )
    sides = {
        side: _total([both[side] for ops in found.values() for both in ops.values()]) for side in ("ours", "plain")
    }
    if args.json:
        nested = {
            d: {op: {s: asdict(c) for s, c in both.items()} for op, both in ops.items()} for d, ops in found.items()
        }
        print(json.dumps({"operations": nested, **{side: asdict(count) for side, count in sides.items()}}))
    else:
        print(_invariance_text(found, sides))
    if sides["ours"].differing:
        print("failed: rows of ours differ; report it with the output of `dspark doctor`", file=sys.stderr)
    elif not sides["plain"].differing:
        print("failed: plain torch differs nowhere here, so the sweep proves nothing", file=sys.stderr)
    return 0 if sides["ours"].differing == 0 < sides["plain"].differing else 1


def _total(counts: list[Counted]) -> Counted:
    return Counted(sum(c.compared for c in counts), sum(c.differing for c in counts))


def _invariance_text(found: dict[str, dict[str, dict[str, Counted]]], sides: dict[str, Counted]) -> str:
    lines = [f"{'rows that differ in any bit':<36}{'compared':>10}{'ours':>14}{'plain torch':>18}"]
    for dtype, operations in found.items():
        lines.append(dtype)
        lines += [_row(f"  {name}", both["ours"], both["plain"]) for name, both in operations.items()]
    told = sum(discriminating(operations) for operations in found.values())
    last = f"{told} of them are of operations for which plain torch differs: those could have failed"
    return "\n".join([*lines, _row("all", sides["ours"], sides["plain"]), last])


def _row(name: str, ours: Counted, plain: Counted) -> str:
    return f"{name:<36}{ours.compared:>10}{ours.differing:>14}{plain.differing:>9} {plain.share:>7.1%}"


def _tax(args: argparse.Namespace) -> int:
    found: dict[str, list[Tax]] = {}
    rows = tuple(args.rows or ROWS)
    with tqdm(desc="tax", disable=args.quiet, file=sys.stderr, leave=False) as bar:
        for dtype in _dtypes(args):
            target = load_target(args.target, dtype)
            found[dtype] = tax(target, rows, args.repeats or REPEATS, lambda n: bar.set_postfix_str(n) or bar.update())
    if args.json:
        print(json.dumps({dtype: [asdict(one) for one in taxes] for dtype, taxes in found.items()}))
    else:
        print(_tax_text(found))
    return 0


def _tax_text(found: dict[str, list[Tax]]) -> str:
    lines = [
        f"{torch.get_num_threads()} threads, medians; ours / plain: min, median, max",
        f"{'':<18}{'rows':>5}{'ours ms':>10}{'plain ms':>10}{'ours / plain':>20}{'logits differ':>15}",
    ]
    for dtype, rows in found.items():
        for one in rows:
            low, middle, high = one.ratio
            lines.append(
                f"{dtype + ' ' + one.kind:<18}{one.rows:>5}{one.ours_ms:>10.1f}{one.plain_ms:>10.1f}"
                f"{low:>7.2f}{middle:>7.2f}{high:>6.2f}{one.difference:>14.1e}"
            )
    return "\n".join(lines)


_BENCHES: dict[str, Callable[[argparse.Namespace], int]] = {
    "invariance": _invariance, "tax": _tax, "step": _step, "metrics": _metrics, "verify": bench_runner.verify,
    "lookup": bench_runner.lookup, "acceptance": bench_runner.acceptance, "replay": bench_runner.replay,
    "runner": bench_serving.runner, "rollouts": bench_rollouts.rollouts, "rl": bench_rl.rl, "rl-runs": bench_rl.runs,
    "following": bench_rl.follow,
}  # fmt: skip
