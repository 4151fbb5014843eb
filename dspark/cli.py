"""The command line: one table from a verb to the module that does it, imported when it is called for.

`dspark VERB ...` serves every verb; `lightning fit|validate|test|predict RECIPE.yaml ...` serves those four and hands
any other word to another package's `lightning` program when one is installed. A mistake the user can mend ends in one
line on stderr and exit code 2; an interrupt ends in 130. Left out on purpose: options that several verbs share (each
verb's options live beside what they steer), except `--debug`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from dspark import __version__
from dspark.contracts import DsparkError
from dspark.help_text import command_parser, fill, table

USER_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb lives and what it does in one line.

    A recipe verb's module has ``run(verb, argv, program, debug) -> exit code``; any other has
    ``add_arguments(parser)`` and ``run(args) -> exit code``.
    """

    module: str
    help: str
    recipe: bool = False


VERBS: dict[str, Verb] = {
    "demo": Verb("dspark.demo", "the whole loop on the embedded target, ending in one table of measured numbers"),
    "prepare": Verb("dspark.commands.prepare", "prompts in, answers by the target out: the data the rest is made from"),
    "fit": Verb("dspark.lightning_cli", "train what a recipe describes", recipe=True),
    "validate": Verb("dspark.lightning_cli", "a recipe's losses and metrics on its validation data", recipe=True),
    "test": Verb("dspark.lightning_cli", "a recipe's report on its test data", recipe=True),
    "predict": Verb("dspark.lightning_cli", "a recipe's predictions, one record per block", recipe=True),
    "calibrate": Verb("dspark.commands.calibrate", "fit a map per slot, so that confidences can be trusted"),
    "export": Verb("dspark.commands.export", "write a draft model as a bundle, after proving it drafts as it trained"),
    "rollout": Verb("dspark.commands.rollout", "speculative rollouts as trajectories with a manifest"),
    "replay": Verb("dspark.commands.replay", "regenerate trajectories and compare them bit for bit"),
    "report": Verb("dspark.commands.report", "acceptance and calibration of a draft model on a test split"),
    "compare": Verb("dspark.commands.compare", "draft models side by side: tau, its ratio, acceptance by slot"),
    "ablate": Verb("dspark.commands.ablate", "variants of one recipe, trained for equal time and compared"),
    "bench": Verb(
        "dspark.commands.bench",
        "measure invariance, its cost, training steps, ways to verify, cut prompts, rollouts",
    ),
    "doctor": Verb("dspark.commands.doctor", "check compiler, kernels and invariance on this machine"),
    "profile": Verb("dspark.commands.profile", "measure what a round costs here by the rows in it: the capacity curve"),
    "simulate": Verb("dspark.commands.simulate", "policies with many users at once, over a capacity curve"),
    "env": Verb("dspark.commands.env", "switches, versions and the machine's fingerprint"),
}
RECIPE_VERBS = tuple(name for name, verb in VERBS.items() if verb.recipe)

INTRO = """
Speculative decoding from end to end: train a draft model for a target, calibrate its confidence, export it, and
collect rollouts that can be regenerated bit for bit.
"""
OUTRO = """
`dspark VERB --help` explains a verb. `--debug` with any of them shows tracebacks and the libraries' own messages.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """`dspark`: the exit code of the verb that ``argv`` (default: this process's arguments) names."""
    return guarded(_dspark, sys.argv[1:] if argv is None else argv)


def lightning_main(argv: Sequence[str] | None = None) -> int:
    """`lightning`: our four verbs; any other word is another package's."""
    return guarded(_lightning, sys.argv[1:] if argv is None else argv)


def guarded(serve: Callable[[list[str], bool], int], argv: Sequence[str]) -> int:
    """Run ``serve(args, debug)`` and turn the ways it may end into an exit code and at most one message on stderr."""
    debug = "--debug" in argv
    try:
        code = serve([arg for arg in argv if arg != "--debug"], debug)
        sys.stdout.flush()
        return code
    except DsparkError as error:
        return _fail(str(error), USER_ERROR, debug)
    except KeyboardInterrupt as interrupt:
        advice = str(interrupt) or "run the same command again to resume"
        return _fail(f"interrupted; {advice}", INTERRUPTED, debug, label="")
    except BrokenPipeError:
        # The reader (`| head`) has gone: point stdout elsewhere, or the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _fail(message: str, code: int, debug: bool, label: str = "error: ") -> int:
    if debug:
        traceback.print_exc()
    sys.stdout.flush()
    print(f"{label}{message}", file=sys.stderr)
    return code


def _dspark(args: list[str], debug: bool) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if args[0] == "--version":
        print(f"dspark {__version__}")
        return 0
    return _run(args[0], args[1:], "dspark", debug)


def _lightning(args: list[str], debug: bool) -> int:
    other = other_lightning()
    if args and args[0] in RECIPE_VERBS:
        return _run(args[0], args[1:], "lightning", debug)
    if not args or args[0] in ("-h", "--help"):
        print(lightning_overview(other))
        return 0
    if other is None:
        raise DsparkError(
            f"lightning: expected one of {', '.join(RECIPE_VERBS)}, but got {args[0]!r}, and no other installed "
            "package brings a program of this name to hand it to. `lightning --help` says what is here."
        )
    return _hand_on(other, args)


def _run(name: str, argv: list[str], program: str, debug: bool) -> int:
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1)
        hint = f"Did you mean `dspark {near[0]}`?" if near else "`dspark --help` lists them."
        raise DsparkError(f"dspark: expected a verb, but got {name!r}. {hint}")
    verb = VERBS[name]
    module = importlib.import_module(verb.module)
    if verb.recipe:
        return int(module.run(name, argv, program, debug) or 0)
    parser = command_parser(f"{program} {name}", module)
    try:
        args = parser.parse_args(argv)
    except SystemExit as asked_for_help:
        return int(asked_for_help.code or 0)
    return int(module.run(args) or 0)


def other_lightning() -> metadata.EntryPoint | None:
    """Another installed distribution's console script named `lightning`, if there is one."""
    for entry in metadata.entry_points(group="console_scripts", name="lightning"):
        if entry.module.partition(".")[0] != "dspark":
            return entry
    return None


def _hand_on(entry: metadata.EntryPoint, args: list[str]) -> int:
    before, sys.argv = sys.argv, ["lightning", *args]
    try:
        result = entry.load()()
    finally:
        sys.argv = before
    return result if isinstance(result, int) else 0


def overview() -> str:
    """The page of `dspark --help`."""
    rows = [(f"{name} RECIPE.yaml" if verb.recipe else name, verb.help) for name, verb in VERBS.items()]
    parts = ["usage: dspark VERB ...", fill(INTRO), "in the order of the journey:\n" + table(rows), fill(OUTRO)]
    return "\n\n".join(parts)


def lightning_overview(other: metadata.EntryPoint | None) -> str:
    """The page of `lightning --help`."""
    rows = [(f"{name} RECIPE.yaml", VERBS[name].help) for name in RECIPE_VERBS]
    last = f"Any other word is handed to the program of {other.module}." if other else "`dspark --help` has the rest."
    usage = "usage: lightning fit|validate|test|predict RECIPE.yaml [--section.key=value ...]"
    return "\n\n".join([usage, "dspark's recipes:\n" + table(rows), fill(last)])
