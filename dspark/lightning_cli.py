"""`fit`, `validate`, `test` and `predict`: LightningCLI over a recipe, without its surprises.

    dspark fit RECIPE.yaml [--section.key=value ...]

The recipe is the whole configuration and the arguments after it override it, left to right. A key is given once and
known, or the run does not start. Checkpoints are loaded with weights_only. Curves go to tb_logs/<recipe's name>, and a
run resumed from a checkpoint in there goes on in its own folder. Left out on purpose: optimizers in the recipe's top
level (modules own theirs), a checkpoint's hyperparameters taking precedence over the recipe's, and random seeds.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from dspark.contracts import DsparkError
from dspark.files import atomic_write
from dspark.recipe import SUFFIXES, read_recipe
from dspark.recipe_errors import explain
from dspark.recipe_help import recipe_page, verb_page
from dspark.training.callbacks import LastCheckpoint
from dspark.training.checkpoint_io import AtomicCheckpointIO, refuse_damaged

LOG_DIR = "tb_logs"
SEED = 0
CKPT_WORDS = ("best", "last", "hpc", "registry")
RUN_FOLDER = re.compile(r"(?P<root>.+)/version_(?P<version>\d+)/checkpoints/[^/]+$")
OTHER_RECIPES = {"variants": "ablate", "splits": "prepare", "samples_per_prompt": "rollout"}  # key -> whose it is
QUIET = (
    r".*does not have many workers.*",
    r".*smaller than the logging interval.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    r"Checkpoint directory .* exists and is not empty.*",
    r"Total length of `list` across ranks is zero.*",  # data.val: []
    r".*litlogger.*|.*litmodels.*",
    r"The dirpath has changed from .*",  # the folder a checkpoint came from is not where this run writes
    r".*GPU available but not used.*",
    r".*`training_step` returned `None`.*",
    r"(?s)Using ModelCheckpoint with manual optimization.*",  # our checkpoints lie between rollouts
    r".*recommended to use `self.log\(.*sync_dist=True\)`.*",  # what is logged has been added up over ranks
)


def run(verb: str, argv: list[str], program: str, debug: bool = False) -> int:
    """Run one of the four verbs on ``argv`` (recipe first, overrides after); 0 when it is done.

    Raises DsparkError on a mistake in the recipe, the overrides or the checkpoint; KeyboardInterrupt (with advice on
    how to go on) when the user stopped it.
    """
    arguments = name_the_config(verb, argv, program)
    recipes = recipe_paths(arguments)
    if {"-h", "--help"} & set(arguments):
        print(recipe_page(program, verb, recipes[0]) if recipes else verb_page(program, verb))
        return 0
    if not recipes:
        raise DsparkError(f"{program} {verb}: expected a recipe. Try `{program} {verb} recipes/drafter.yaml`.")
    sources = [(path, read_recipe(path)) for path in recipes]
    if not debug:
        quieten()
    refuse_command_recipes(program, verb, sources)
    given = {"verb": verb, "sources": sources, "arguments": arguments, "program": program}
    cli_class = type("RecipeCLI", (RecipeCLI,), given)
    try:
        cli_class()
    except SystemExit as done:  # after --print_config
        return int(done.code or 0)
    except MisconfigurationException as error:
        raise DsparkError(f"{recipes[-1]}: {' '.join(str(error).split())}") from error
    except ValueError as error:  # the parser wraps what a class raises while it is built
        raise user_error(error) or error from error
    return 0


def refuse_command_recipes(program: str, verb: str, sources: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Raises DsparkError for a recipe of another verb (dspark ablate, prepare, rollout), told by a key of its own."""
    for path, content in sources:
        for key, owner in OTHER_RECIPES.items():
            if key in content and "model" not in content:
                raise DsparkError(
                    f"{path}: expected a recipe with model, data and trainer for {program} {verb}, but this is one of "
                    f"`dspark {owner}`. Run `dspark {owner} {path}`."
                )


def user_error(error: BaseException) -> DsparkError | None:
    """The DsparkError behind an exception, if one caused it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DsparkError):
        cause = cause.__cause__ or cause.__context__
    return cause


def name_the_config(verb: str, argv: Sequence[str], program: str) -> list[str]:
    """``[RECIPE.yaml, ...]`` becomes ``[--config, RECIPE.yaml, ...]``; a bare word that is no YAML file is an error."""
    if not argv or argv[0].startswith("-"):
        return list(argv)
    if not argv[0].endswith(SUFFIXES):
        raise DsparkError(
            f"{program} {verb}: expected RECIPE.yaml first, but got {argv[0]!r}. Overrides start with --."
        )
    return ["--config", *argv]


def recipe_paths(arguments: Sequence[str]) -> list[str]:
    """The files behind every --config (-c) in ``arguments``, in order."""
    paths = [after for flag, after in pairwise(arguments) if flag in ("--config", "-c")]
    return paths + [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]


def quieten() -> None:
    """Keep the libraries' tips, device lines and known warnings out of a normal run."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in QUIET:
        warnings.filterwarnings("ignore", message=message)


class RecipeCLI(LightningCLI):
    """LightningCLI for one verb. Class attributes (set by ``run``): the verb, the recipes read, the arguments."""

    verb: str = "fit"
    sources: Sequence[tuple[str, dict[str, Any]]] = ()
    arguments: Sequence[str] = ()
    program: str = "dspark"

    def __init__(self) -> None:
        super().__init__(
            args=[self.verb, *self.arguments],
            seed_everything_default=SEED,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"logger": self._default_logger(), "enable_model_summary": False},
            parser_kwargs={"exit_on_error": False, self.verb: {"exit_on_error": False}},
            auto_configure_optimizers=False,
        )

    @classmethod
    def subcommands(cls) -> dict[str, set[str]]:  # ours alone: the other three cost a second
        return {cls.verb: LightningCLI.subcommands()[cls.verb]}

    def _default_logger(self) -> dict[str, Any]:
        name = Path(self.sources[-1][0]).stem if self.sources else self.verb
        return {
            "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
            "init_args": {"save_dir": LOG_DIR, "name": name, "default_hp_metric": False},
        }

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if "weights_only" in self._subcommand_method_arguments[subcommand]:
            parser.set_defaults({"weights_only": True})
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
        except (argparse.ArgumentError, TypeError, ValueError) as error:
            known = [action.dest for action in self._subcommand_parsers[self.verb]._actions]
            raise DsparkError(explain(str(error), list(self.sources), list(self.arguments), known)) from error

    def _parse_ckpt_path(self) -> None:
        # LightningCLI lets the checkpoint's hyperparameters override the recipe; here the recipe is the law.
        self._take_last_checkpoint()
        path = self.config[self.verb].get("ckpt_path")
        if not path or path in CKPT_WORDS:
            return
        checkpoint = load_checkpoint(path, self.verb)
        self._check_checkpoint(path, checkpoint)
        if self.verb == "fit":
            self._go_on_in_the_same_folder(path, int(checkpoint.get("global_step", 0)))

    def _take_last_checkpoint(self) -> None:
        """`test` of a model that says nothing untrained (its class says so): last.ckpt of the recipe's folder."""
        config = self.config[self.verb]
        model = locate((config.get("model") or {}).get("class_path", ""))
        if self.verb == "test" and not config.get("ckpt_path") and getattr(model, "tests_last", False):
            config["ckpt_path"] = str(Path(config.trainer.get("default_root_dir") or ".") / "last.ckpt")

    def _check_checkpoint(self, path: str, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("hyper_parameters", {}).get("_class_path")
        given = (self.config[self.verb].get("model") or {}).get("class_path")
        if saved and given and saved != given:
            raise DsparkError(
                f"{path}: expected a checkpoint of {given} (the recipe's model), but it holds a {saved}. "
                "Give the recipe it was trained with, or another checkpoint."
            )

    def _go_on_in_the_same_folder(self, path: str, step: int) -> None:
        logger = self.config[self.verb].trainer.get("logger")
        match = RUN_FOLDER.match(Path(path).as_posix())
        if not match or not hasattr(logger, "get") or "TensorBoardLogger" not in str(logger.get("class_path")):
            return
        args = logger.init_args
        folder = Path(args.save_dir) / (args.name or "")
        if args.version is None and folder.resolve() == Path(match["root"]).resolve():
            args.version = int(match["version"])
            logger["dict_kwargs"] = {"purge_step": step + 1}  # drops the points after the checkpoint

    def before_instantiate_classes(self) -> None:
        trainer = self.config[self.verb].trainer
        bars = [c for c in trainer.get("callbacks") or [] if "ProgressBar" in str(c.get("class_path"))]
        if trainer.get("enable_progress_bar") is not False and not bars:
            self.trainer_defaults["callbacks"] = [TQDMProgressBar(refresh_rate=1 if sys.stderr.isatty() else 20)]

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Any]) -> Any:
        config["plugins"] = with_checkpoint_io(config.get("plugins"), config.get("strategy"))
        try:
            return super()._instantiate_trainer(config, callbacks)
        except (ValueError, TypeError) as error:  # flags that contradict each other, or this machine
            raise user_error(error) or DsparkError(f"trainer: {' '.join(str(error).split())}") from error

    def after_instantiate_classes(self) -> None:
        root = Path(self.trainer.default_root_dir)
        if root.exists() and not root.is_dir():
            raise DsparkError(f"trainer.default_root_dir: expected a folder, but {root} is a file.")
        # Before anything of this run is written: the trainer itself would find out after it saved the configuration.
        path = self.config[self.verb].get("ckpt_path")
        if not path or path in CKPT_WORDS:
            return
        saved = load_checkpoint(path, self.verb).get("state_dict", {})
        for name, tensor in self.model.state_dict().items():
            if name in saved and saved[name].shape != tensor.shape:
                raise DsparkError(
                    f"{path}: expected {name} of shape {list(tensor.shape)} (the recipe's model), but it is "
                    f"{list(saved[name].shape)} in the checkpoint. Use the recipe it was trained with."
                )

    def _run_subcommand(self, subcommand: str) -> None:
        if refuse := getattr(self.model, "refuse_verb", None):
            refuse(subcommand)
        try:
            super()._run_subcommand(subcommand)
        except SystemExit as left:
            # The trainer turns an interrupt into exit code 1; the caller wants to know that it was one.
            if self.trainer.state.status == TrainerStatus.INTERRUPTED:
                raise KeyboardInterrupt(self._advice()) from left
            raise
        except RuntimeError as error:
            if "loading state_dict" not in str(error):
                raise
            raise DsparkError(self._misfit(str(error))) from error
        self._tell()

    def _tell(self) -> None:
        """What a finished run left behind, and where."""
        if not self.trainer.is_global_zero:
            return
        if self.verb == "fit" and (path := self._last_checkpoint()):
            following = f"; next: {self._next_command(path)}" if is_overridden("test_step", self.model) else ""
            print(f"checkpoint: {path}{following}", file=sys.stderr)
        if self.verb == "predict":
            target = Path(self.trainer.default_root_dir) / "predictions.jsonl"
            records = list(records_of(self.trainer.predict_loop.predictions))
            atomic_write(target, "".join(json.dumps(r) + "\n" for r in records))
            print(f"{len(records)} records, one a block: {target}", file=sys.stderr)

    def _next_command(self, path: str) -> str:
        words = [*self.arguments]
        if "--ckpt_path" in words:
            del words[words.index("--ckpt_path") : words.index("--ckpt_path") + 2]
        words = [word for word in words if not word.startswith("--ckpt_path=")]
        if words[:1] == ["--config"]:
            del words[0]
        return f"{self.program} test {shlex.join([*words, '--ckpt_path', path])}"

    def _last_checkpoint(self) -> str:
        """The newest that this run wrote, or went on from; an older run's in the same folder is none of it."""
        ours = (c.written for c in self.trainer.checkpoint_callbacks if isinstance(c, LastCheckpoint))
        if (written := next(filter(None, ours), None)) is not None:
            return str(written)
        callback = self.trainer.checkpoint_callback
        found = getattr(callback, "last_model_path", "") or getattr(callback, "best_model_path", "")
        return found or str(self.trainer.ckpt_path or "")

    def _advice(self) -> str:
        path = self._last_checkpoint()
        return f"to resume, run the same command with --ckpt_path {path}" if path and self.verb == "fit" else ""

    def _misfit(self, text: str) -> str:
        path = self.config[self.verb].get("ckpt_path")
        details = "; ".join(line.strip().rstrip(".:") for line in text.splitlines()[1:4])
        return f"{path}: expected the weights of the recipe's model, but {details}. Use the recipe it was trained with."


def with_checkpoint_io(plugins: Any, strategy: Any) -> list[Any]:
    """A trainer's plugins with the one that writes checkpoints whole, unless they or the strategy bring their own."""
    given = plugins if isinstance(plugins, list) else [] if plugins is None else [plugins]
    owned = [*given, getattr(strategy, "_checkpoint_io", None)]
    return given if any(isinstance(plugin, CheckpointIO) for plugin in owned) else [*given, AtomicCheckpointIO()]


def records_of(batches: Iterable[dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Batches of named columns, tensors [B, ...] or lists of B, as B plain records each."""
    for batch in batches:
        columns = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in (batch or {}).items()}
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))


def load_checkpoint(path: str, verb: str) -> dict[str, Any]:
    """A checkpoint of plain tensors and values, for `lightning VERB`. Raises DsparkError when there is none, or it
    holds more than that."""
    if not Path(path).is_file():
        advice = "train first: lightning fit RECIPE.yaml."
        if verb == "fit":
            advice = (
                "leave it out: lightning fit RECIPE.yaml starts from the beginning (a run of RL from the rollouts "
                "that are there)."
            )
        raise DsparkError(
            f"{path}: expected a checkpoint (--ckpt_path), but there is no such file. Give another, or {advice}"
        )
    refuse_damaged(path)
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DsparkError(
            f"{path}: expected a checkpoint of weights and plain values, but it cannot be read as one "
            f"({type(error).__name__}). It is damaged, of another program, or holds code, which is never run."
        ) from error
    return checkpoint
