"""The demo's last page: what this run measured, at 80 columns."""

from __future__ import annotations

from typing import Any

RULE = "-" * 78
PLACES = (
    ("answers", "runs/demo/responses"),
    ("draft model", "runs/demo/bundle"),
    ("rollouts", "runs/demo/rollouts"),
    ("report, plots", "runs/demo/report/report.html"),
    ("TensorBoard", "tensorboard --logdir tb_logs"),
)


def as_text(results: dict[str, Any]) -> str:
    """The table of one run's results (Demo.run)."""
    measured = results["measured"]
    parts = [
        [RULE, "acceptance on the test split (tau: tokens per round, the target's own included)"],
        _acceptance(results["calibration"]["acceptance"], measured),
        [RULE, "confidence: ECE of the survival on the test split"],
        _calibration(results["calibration"]),
        [RULE, "speed of the same runner at batch 1, tokens/s, min / median / max"],
        _speed(measured["speed"]),
        [RULE, "bit for bit"],
        _bits(results),
        [RULE, *(f"{name:<16}{place}" for name, place in PLACES)],
    ]
    return "\n".join(line for part in parts for line in part)


def _acceptance(recommended: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Every domain and slot at the recommended sampling (the test split's rounds), overall at temperature 0 and 1."""
    slots = len(recommended["overall"]["per_slot"])
    lines = [f"{'':<24}{'tau':>6}{'drafts':>8}  " + "".join(f"{f'slot {k + 1}':>7}" for k in range(slots))]
    for domain, one in recommended.items():
        lines.append(_row(f"{_setting(measured['recommended'])}, {domain}", one))
    for name in ("greedy", "hot"):
        lines.append(_row(f"{_setting(measured[name])}, overall", measured[name]["acceptance"]["overall"]))
    return lines


def _row(name: str, one: dict[str, Any]) -> str:
    rates = "".join(f"{'-' if r is None else f'{100 * r:.0f} %':>7}" for r in one["per_slot"])
    return f"{name:<24}{one['tau']:>6.2f}{one['accepted']:>8.2f}  {rates}"


def _setting(run: dict[str, Any]) -> str:
    setting = run["setting"]
    top = f" p {setting['top_p']:g}" if setting["top_p"] < 1 else ""
    return f"T {setting['temperature']:g}{top}"


def _calibration(result: dict[str, Any]) -> list[str]:
    rows = result["survival"]

    def line(name: str, key: str, percent: bool = True) -> str:
        cells = ("-" if r[key] is None else f"{100 * r[key]:.2f} %" if percent else f"{r[key]:.3f}" for r in rows)
        return f"{name:<14}" + "".join(f"{cell:>9}" for cell in cells)

    head = f"{'':<14}" + "".join(f"{_slot(r['slot']):>9}" for r in rows)
    return [head, line("ECE before", "before"), line("ECE after", "after"), line("AUROC", "auroc", False)]


def _slot(slot: int | str) -> str:
    return f"slot {slot}" if isinstance(slot, int) else slot


def _speed(speed: dict[str, Any]) -> list[str]:
    def spread(values: list[float], form: str) -> str:
        return " / ".join(format(v, form) for v in values)

    lines = []
    for name, one in speed["engines"].items():
        ratio = "" if name == "plain" else f"   {spread(one['ratio'], '.2f')} x plain"
        lines.append(f"{name:<26}{spread(one['rate'], '5.1f')}{ratio}")
    differing = sum(one["mismatched"] for one in speed["engines"].values())
    tokens = next(iter(speed["engines"].values()))["tokens"]
    return [*lines, f"({tokens} tokens, {speed['repeats']} interleaved repeats, {differing} outputs differ)"]


def _bits(results: dict[str, Any]) -> list[str]:
    replay = results["replay"]
    lines = [
        f"replayed: {replay['checked']} trajectories, {replay['tokens']} tokens, {replay['differing_bits']} bits differ"
    ]
    for name in ("greedy", "recommended", "hot"):
        run = results["measured"][name]
        lines.append(
            f"{run['setting']['verifier']} speculative == plain at {_setting(run)}: {run['differing']} of "
            f"{run['sequences']} differ"
        )
        lines.append(
            f"    {run['drafted']} drafted, {run['accepted']} accepted, {run['rejected']} rounds with a rejection"
        )
    return lines
