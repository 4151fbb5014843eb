"""`dspark bench runner`: our runner's speed, alone or against transformers or vLLM, and the machine's limits."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from dspark import ops
from dspark.bench import arriving, serving
from dspark.bench.peers import Peer, Transformers, Vllm, faster
from dspark.bench.roofline import Rates, measure_rates
from dspark.commands.recipe_options import whole_number
from dspark.commands.running import Loaded, load, load_curve
from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.corpus.prompts import load_prompts
from dspark.files import atomic_write, check_place
from dspark.noise import derive_seed
from dspark.runner import EngineOptions
from dspark.target.load import checkpoint_dir

BELONGS = dict.fromkeys(("against", "peer_dtype", "batches", "parts", "contexts", "arrivals"), ("runner",))
PARTS = ("speed", "arrivals", "memory", "contexts")
PEERS = ("transformers", "vllm")
DTYPES = ("bfloat16", "float32")
LONG_BATCH = 1  # requests at once at each context
DECODED = 16  # tokens after the first, at each context
CHECKED = 16  # requests that came over time and are answered again alone


@dataclass(frozen=True)
class RunnerOptions:
    """What `dspark bench runner` is run on. limit: prompts at batch 1; a larger batch takes as many as it holds."""

    prompts: str = "data/prompts/test.jsonl"
    limit: int = 4
    max_tokens: int = 64
    batches: tuple[int, ...] = (1, 8, 32)
    repeats: int = 3
    parts: tuple[str, ...] = PARTS
    contexts: tuple[int, ...] = (128, 1024, 4096)
    arrivals: int = 200
    peer_dtype: str = ""


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that only this one has; None where not given."""
    of, many = RunnerOptions(), whole_number(1)
    parser.add_argument("--against", choices=PEERS, help="for runner: another engine, in turn (default: none)")
    parser.add_argument(
        "--peer_dtype",
        choices=DTYPES,
        help="for runner: the other engine's (default: transformers: the faster)",
    )
    parser.add_argument("--batches", type=many, nargs="+", help="for runner: requests at once (default: 1 8 32)")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        metavar="PART",
        help=f"for runner (default: {' '.join(PARTS)})",
    )
    parser.add_argument("--contexts", type=many, nargs="+", help="for runner: prompt lengths (default: 128 1024 4096)")
    parser.add_argument(
        "--arrivals", type=many, help=f"for runner: requests that come over time (default: {of.arrivals})"
    )


def runner(args: argparse.Namespace) -> int:
    """Measure, print and with --out write; 0, or 1 when an output that must be plain decoding's is not."""
    names = RunnerOptions.__dataclass_fields__
    options = RunnerOptions(**{name: getattr(args, name) for name in names if getattr(args, name) is not None})
    if args.out:
        check_place(args.out)
    dtype = args.dtype or "bfloat16"
    loaded = load(args.target, dtype, args.drafter or "")
    _check_contexts(loaded, options)
    peers = _peers(args.against, loaded, options)
    try:
        with tqdm(desc="runner", unit="run", disable=args.quiet, file=sys.stderr, leave=False) as bar:
            found = _measure(loaded, options, peers, args.curve or "", bar.update)
    finally:
        for peer in peers:
            peer.close()
    told = json.dumps(found, indent=1)
    if args.out:
        atomic_write(args.out, told + "\n")
    print(told if args.json else "\n".join(_text(found)))
    wrong = [row for row in (*found.get("speed", ()), *found.get("arrivals", ())) if row["wrong"]]
    return 1 if wrong else 0


def _check_contexts(loaded: Loaded, options: RunnerOptions) -> None:
    longest = loaded.target.config.max_position_embeddings
    if "contexts" in options.parts and max(options.contexts) + DECODED + 1 > longest:
        raise DsparkError(
            f"bench runner: expected --contexts that fit {longest} tokens (the target's context) with {DECODED + 1} "
            f"more, but got {max(options.contexts)}."
        )


def _peers(against: str | None, loaded: Loaded, options: RunnerOptions) -> tuple[Peer, ...]:
    """transformers in the dtype that it is faster in here, unless one was asked for: bf16 where the processor has
    instructions for it, else fp32."""
    folder, asked = checkpoint_dir(loaded.source), options.peer_dtype
    if against == "transformers":
        candidates = [Transformers(folder, dtype) for dtype in ([asked] if asked else DTYPES)]
        short = [replace(r, params=replace(r.params, max_tokens=4)) for r in _requests(loaded, 8, options)]
        return (faster(candidates, short) if len(candidates) > 1 else candidates[0],)
    if against == "vllm":
        longest = max(*options.contexts, 512) + DECODED + 1 + options.max_tokens
        return (Vllm(folder, asked or loaded.dtype, longest, max(options.batches)),)
    return ()


def _measure(
    loaded: Loaded, options: RunnerOptions, peers: tuple[Peer, ...], curve: str, on_run: Callable[[], object]
) -> dict[str, Any]:
    drafter = loaded.bundle.drafter if loaded.bundle else None
    parts = serving.Parts(loaded.target, drafter, load_curve(curve, loaded), peers)
    rates = measure_rates(loaded.target.dtype)
    requests = _requests(loaded, max(*options.batches, options.limit), options)
    found: dict[str, Any] = {"machine": ops.fingerprint(), "dtype": loaded.dtype, "rates": asdict(rates),
                             "options": asdict(options)}  # fmt: skip
    if "speed" in options.parts:
        found["speed"] = [
            asdict(row)
            for batch in options.batches
            for row in serving.speeds(
                parts, requests[: max(batch, options.limit)], batch, options.repeats, rates, on_run
            )
        ]
    if "arrivals" in options.parts:
        found["arrivals"] = [asdict(one) for one in _arrivals(loaded, parts, options, on_run)]
    if "memory" in options.parts:
        each = min(1024, loaded.target.config.max_position_embeddings // 2)
        held = serving.memory(loaded.target, _long(loaded, options, each, 8))
        found["memory"] = {**asdict(held), "ratio": held.ratio}
    if "contexts" in options.parts:
        found["contexts"] = [
            asdict(serving.contexts(parts, _long(loaded, options, n, LONG_BATCH), LONG_BATCH, DECODED, 1, on_run))
            for n in options.contexts
        ]
    return found


def _requests(loaded: Loaded, count: int, options: RunnerOptions) -> list[Request]:
    """`count` requests, the prompts from the start again where there are fewer."""
    prompts = load_prompts(options.prompts, loaded.tokenizer).prompts
    params = SamplingParams(max_tokens=options.max_tokens)
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    return [Request(p.prompt_ids, params.with_seed(derive_seed(0, p.prompt_id, i))) for i, p in enumerate(chosen)]


def _long(loaded: Loaded, options: RunnerOptions, tokens: int, count: int) -> list[list[int]]:
    """`count` prompts of so many tokens each, of the prompts one after the other."""
    ids = [i for p in load_prompts(options.prompts, loaded.tokenizer).prompts for i in p.prompt_ids]
    ids *= -(-tokens * count // len(ids))
    return [ids[i * tokens : (i + 1) * tokens] for i in range(count)]


def _arrivals(
    loaded: Loaded, parts: serving.Parts, options: RunnerOptions, on_run: Callable[[], object]
) -> list[arriving.Arrived]:
    """At 1.5 requests a second for each one that plain decoding finishes at a time: more than a server of single
    requests could take. Answers of a quarter to all of max_tokens."""
    batch = max(options.batches)
    base = serving.with_law(_requests(loaded, options.arrivals, options), serving.RECOMMENDED)
    least = max(1, options.max_tokens // 4)
    lengths = [least + derive_seed(1, "length", i) % (options.max_tokens - least + 1) for i in range(len(base))]
    requests = [_of_length(r, n) for r, n in zip(base, lengths, strict=True)]
    for peer in parts.peers:
        peer.answer(requests[:1], batch)  # warm
    room = sum(len(r.prompt_ids) + r.params.max_tokens for r in requests[:2])
    serving.finish(parts.engine(serving.Way("plain"), 1, room), requests[:1])
    alone = serving.finish(parts.engine(serving.Way("plain"), 1, room), requests[:2])
    at = arriving.arrivals(len(requests), 1.5 * 2 / alone.seconds)
    ways = [way for way in parts.ways() if way.law == serving.RECOMMENDED and (not way.drafts or way.scheduled)]
    rows = EngineOptions().kv_tokens
    found = [
        arriving.serve(way.name, parts.engine(way, batch, rows), requests, at, CHECKED, on_run) for way in ways
    ]  # fmt: skip
    return found + [arriving.serve_by_batches(peer, requests, at, batch, on_run) for peer in parts.peers]


def _of_length(request: Request, tokens: int) -> Request:
    return Request(request.prompt_ids, replace(request.params, max_tokens=tokens))


def _text(found: dict[str, Any]) -> list[str]:
    rates = Rates(**found["rates"])
    lines = [
        f"{torch.get_num_threads()} threads, {found['dtype']}; reads {rates.read / 1e9:.1f} GB/s, multiplies "
        f"{rates.matmul / 1e9:.0f} GFLOP/s"
    ]
    lines += _speed_text(found["speed"]) if "speed" in found else []
    lines += _arrivals_text(found["arrivals"]) if "arrivals" in found else []
    if "memory" in found:
        held = found["memory"]
        lines.append(
            f"memory: {held['grown'] / held['cached']:.0f} bytes a cached token, {held['ratio']:.2f} x its keys and "
            f"values ({held['cached']} tokens)"
        )
    return lines + (_contexts_text(found["contexts"]) if "contexts" in found else [])


def _speed_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        low, middle, high = row["rate"]
        lines.append(f"batch {row['batch']}, {row['side']}: {middle:.1f} tokens/s ({low:.1f} to {high:.1f})")
        if "agrees" in row["ratios"]:
            share = row["ratios"]["agrees"][0]
            lines.append(f"    says what we say for {share:.0%} of the tokens, up to the first that differs")
            continue
        for name, (a, b, c) in row["ratios"].items():
            lines.append(f"    {b:.2f} x {name} ({a:.2f} to {c:.2f})")
        if row["roof"]:
            lines.append(
                f"    {row['read_gb']:.1f} GB and {row['gflop']:.0f} GFLOP need {row['least']:.2f} s; it took "
                f"{row['roof']:.2f} x that"
            )
        if row["tau"] > 1 or row["wrong"]:
            lines.append(f"    tau {row['tau']:.2f}; {row['wrong']} differ from plain")
    return lines


def _arrivals_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'requests over time':<28}{'tokens/s':>9}{'first token, s':>17}{'whole answer, s':>18}{'differ':>8}",
             f"{'':<28}{'':>9}{'median, 95 %':>17}{'median, 95 %':>18}"]  # fmt: skip
    for row in rows:
        first, last = (f"{two[0]:.2f}, {two[1]:.2f}" if two else "-" for two in (row["first"], row["last"]))
        wrong = f"{row['wrong']}/{row['checked']}" if row["checked"] else "-"
        lines.append(f"{row['side'][:27]:<28}{row['rate']:>9.1f}{first:>17}{last:>18}{wrong:>8}")
    return lines


def _contexts_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        sides = [f"{name} {row['first'][name]:.2f} s, then {row['rate'][name]:.1f} tokens/s" for name in row["first"]]
        lines.append(f"context {row['tokens']}, first token and decoding: {sides[0]}")
        lines += [f"    {side}" for side in sides[1:]]
    return lines
