"""The command line: dispatch, pages, exit codes, and LightningCLI without its surprises, on a toy module."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from dspark import cli
from dspark.contracts import DsparkError

ROOT = Path(__file__).resolve().parent.parent
MISSING = [name for name, verb in cli.VERBS.items() if importlib.util.find_spec(verb.module) is None]
TOY = '''
from dataclasses import dataclass, field
import time
import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset
from dspark.contracts import DsparkError


@dataclass
class Shape:
    rank: int = 4
    kind: str = "vanilla"


class Toy(lightning.LightningModule):
    """A toy.

    Args:
        width: how wide it is.
        learning_rate: step size.
        shape: nested options.
        fail: where to fail, if anywhere.
        pause: seconds a step takes.
    """

    def __init__(
        self,
        width: int = 3,
        learning_rate: float = 0.1,
        shape: Shape = Shape(),
        fail: str = "",
        pause: float = 0.0,
    ):
        super().__init__()
        if fail == "init":
            raise DsparkError("toy: expected not to fail, but was told to.")
        self.save_hyperparameters("width", "learning_rate")
        self.layer = torch.nn.Linear(width, 1)
        self.fail, self.pause = fail, pause

    def training_step(self, batch, index):
        if self.fail == "step":
            raise DsparkError("toy: expected a good batch, but got a bad one.")
        time.sleep(self.pause)
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def test_step(self, batch, index):
        self.log("test_loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.learning_rate)


class ToyData(lightning.LightningDataModule):
    def __init__(self, rows: int = 8, width: int = 3):
        super().__init__()
        self.rows, self.width = rows, width

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(self.rows, self.width)), batch_size=2)

    test_dataloader = train_dataloader
'''


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "dspark_cli_toy.py").write_text(TOY, encoding="utf-8")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes toy.yaml into a fresh working folder. Keywords: the model's init_args; ``text`` replaces the file."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | None = None, trainer: dict[str, object] | None = None, **init_args: object) -> str:
        content = {
            "model": {"class_path": "dspark_cli_toy.Toy", "init_args": init_args},
            "data": {"class_path": "dspark_cli_toy.ToyData"},
            "trainer": {"max_epochs": 1, "accelerator": "cpu", "enable_progress_bar": False, **(trainer or {})},
        }
        Path("toy.yaml").write_text(textwrap.dedent(text) if text else yaml.safe_dump(content), encoding="utf-8")
        return "toy.yaml"

    return write


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must fail as a user's mistake; its one line on stderr without the label."""
    assert cli.main(argv) == cli.USER_ERROR
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert captured.out == ""
    return lines[0].removeprefix("error: ")


# --- dispatch and pages


def test_the_table_names_every_command() -> None:
    wanted = (
        "fit validate test predict demo prepare calibrate export rollout replay report compare ablate bench doctor "
        "profile simulate env"
    )
    assert sorted(cli.VERBS) == sorted(wanted.split())
    assert cli.RECIPE_VERBS == ("fit", "validate", "test", "predict")


@pytest.mark.parametrize("name", cli.VERBS)
def test_every_verb_has_a_page_of_80_columns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name in MISSING:
        pytest.skip(f"{cli.VERBS[name].module} is not there yet")
    assert cli.main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"usage: dspark {name}")
    assert max(map(len, page.splitlines())) <= 80, [line for line in page.splitlines() if len(line) > 80]
    assert len(page.splitlines()) > 6


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_the_overview_lists_every_verb(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {name}" in page for name in cli.VERBS)
    assert max(map(len, page.splitlines())) <= 80


def test_version_and_unknown_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("dspark ")
    assert "Did you mean `dspark rollout`?" in error_of(capsys, "rolout")
    assert "`dspark --help` lists them" in error_of(capsys, "zzzzzz")
    assert "unrecognized arguments: --jsn" in error_of(capsys, "env", "--jsn")


def test_env_as_table_and_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_USE_NEXTN_DECODE", "7")
    monkeypatch.setenv("DEEPINFER_PORT", "80")
    assert cli.main(["env"]) == 0
    page = capsys.readouterr().out
    assert "DEEPINFER_USE_NEXTN_DECODE                    7 (set)" in page
    assert "DEEPINFER_PORT" in page
    assert max(map(len, page.splitlines())) <= 80
    assert cli.main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["switches"]["use_nextn_decode"] == 7
    assert facts["switches"]["max_backtracking_tokens"] == 8
    assert facts["versions"]["torch"] == torch.__version__
    monkeypatch.setenv("DEEPINFER_BATCH_INVARIANT", "maybe")
    assert "DEEPINFER_BATCH_INVARIANT" in error_of(capsys, "env")


# --- how a command may end


def ends_with(monkeypatch: pytest.MonkeyPatch, ending: BaseException | int) -> None:
    module = ModuleType("dspark_fake_command")
    module.__doc__ = "A fake."
    module.add_arguments = lambda parser: None  # type: ignore[attr-defined]

    def run(args: object) -> int:
        if isinstance(ending, BaseException):
            raise ending
        return ending

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dspark_fake_command", module)
    monkeypatch.setitem(cli.VERBS, "fake", cli.Verb("dspark_fake_command", "fake"))


def test_exit_codes_and_messages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ends_with(monkeypatch, 1)
    assert cli.main(["fake"]) == 1
    ends_with(monkeypatch, DsparkError("here: expected this, but got that."))
    assert error_of(capsys, "fake") == "here: expected this, but got that."
    ends_with(monkeypatch, KeyboardInterrupt())
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to resume\n"
    ends_with(monkeypatch, ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ends_with(monkeypatch, DsparkError("here: wrong."))
    for argv in (["--debug", "fake"], ["fake", "--debug"]):
        assert cli.main(argv) == 2
        captured = capsys.readouterr().err
        assert "Traceback" in captured
        assert captured.endswith("error: here: wrong.\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = "import sys; from dspark import cli; cli.overview = lambda: 'x\\n' * 10**6; sys.exit(cli.main([]))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait(60) == cli.BROKEN_PIPE


# --- the program named lightning


class OtherEntry:
    """Stands for another distribution's console script."""

    name, module = "lightning", "lightning_other.cli"

    def load(self) -> Callable[[], int]:
        return lambda: print("other got", sys.argv[1:]) or 7  # type: ignore[func-returns-value]


def entries(monkeypatch: pytest.MonkeyPatch, *found: object) -> None:
    ours = metadata.EntryPoint("lightning", "dspark.cli:lightning_main", "console_scripts")
    monkeypatch.setattr(cli.metadata, "entry_points", lambda **kwargs: (ours, *found))


def test_lightning_hands_other_words_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entries(monkeypatch, OtherEntry())
    assert cli.lightning_main(["login", "--now"]) == 7
    assert capsys.readouterr().out == "other got ['login', '--now']\n"
    assert cli.lightning_main([]) == 0
    assert "lightning_other" in capsys.readouterr().out


def test_lightning_alone_says_what_it_has(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    entries(monkeypatch)
    assert cli.lightning_main(["login"]) == 2
    assert "expected one of fit, validate, test, predict, but got 'login'" in capsys.readouterr().err
    assert cli.lightning_main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: lightning fit|validate|test|predict RECIPE.yaml")
    assert cli.lightning_main(["fit"]) == 2
    assert "lightning fit: expected a recipe" in capsys.readouterr().err


# --- recipes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("width: 3", "widht: 3", "toy.yaml: unknown key widht. Did you mean width?"),
        ("width: 3", "zzz: 3", "Allowed here: width, learning_rate, shape"),
        ("rank: 4", "rnak: 4", "toy.yaml: unknown key shape.rnak. Did you mean shape.rank?"),
        ("rank: 4", "rank: four", "model.shape.rank: dspark_cli_toy.Toy: expected int, but got four."),
        ("max_epochs", "max_epoch", "unknown key trainer.max_epoch. Did you mean trainer.max_epochs?"),
        ("max_epochs: 1", "max_epochs: many", "trainer.max_epochs: expected int, but got many."),
        ("Toy\n", "Tox\n", "has no attribute 'Tox'"),
        ("data:", "dta:", "unknown key dta. Did you mean data?"),
        ("data:", "model:", "toy.yaml:7: expected each key once, but model is given again (first in line 1)"),
        ("rank: 4", "rank: 4\n      rank: 5", "model.init_args.shape.rank is given again"),
        ("width: 3", "width: [3", "not valid YAML"),
        ("trainer:\n  max_epochs: 1", "trainer: 3", "expected trainer to be a section of keys, but got 3"),
    ],
)
def test_a_mistake_in_a_recipe_is_one_line(
    recipe: Callable[..., str], capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    text = """\
    model:
      class_path: dspark_cli_toy.Toy
      init_args:
        width: 3
        shape: {nest}
    data:
      class_path: dspark_cli_toy.ToyData
    trainer:
      max_epochs: 1
    """
    text = textwrap.dedent(text).replace("shape: {nest}", "shape:\n      rank: 4")
    assert old in text
    assert message in error_of(capsys, "fit", recipe(text=text.replace(old, new)))
    assert not Path("tb_logs").exists()


def test_mistakes_on_the_command_line(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(width=3)
    assert error_of(capsys, "fit", path, "--model.widht=4").startswith("the command line: unknown key widht.")
    assert "Did you mean shape.rank?" in error_of(capsys, "fit", path, "--model.shape.rnk=4")
    assert "Did you mean trainer.max_steps?" in error_of(capsys, "fit", path, "--trainer.max_stepz", "4")
    assert "expected int, but got x" in error_of(capsys, "fit", path, "--model.width=x")
    assert "expected RECIPE.yaml first, but got 'toy'" in error_of(capsys, "fit", "toy")
    assert "there is none. Is it toy.yaml?" in error_of(capsys, "fit", "tyo.yaml")
    assert "expected a recipe" in error_of(capsys, "fit")
    assert "there is no such file" in error_of(capsys, "fit", path, "--ckpt_path", "nope.ckpt")
    assert not Path("tb_logs").exists()


def test_a_module_that_refuses_its_input(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(capsys, "fit", recipe(fail="init")) == "toy: expected not to fail, but was told to."
    assert error_of(capsys, "fit", recipe(fail="step")) == "toy: expected a good batch, but got a bad one."


def test_print_config_is_clean_and_runs_again(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(width=3)
    assert cli.main(["fit", path, "--model.shape.rank=9", "--trainer.max_steps", "5", "--print_config"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    config = yaml.safe_load(captured.out)
    assert config["model"]["init_args"]["shape"] == {"rank": 9, "kind": "vanilla"}
    assert config["trainer"]["max_steps"] == 5
    assert config["seed_everything"] == 0
    assert config["weights_only"] is True
    Path("again.yaml").write_text(captured.out, encoding="utf-8")
    assert cli.main(["fit", "again.yaml", "--print_config"]) == 0
    again = yaml.safe_load(capsys.readouterr().out)
    assert again == config


def test_a_recipes_page_lists_its_options(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", recipe(width=3), "--help"]) == 0
    page = capsys.readouterr().out
    assert "how wide it is. (recipe: 3)" in page
    assert "step size. (default: 0.1)" in page
    assert "--data.rows" in page


def test_fit_then_resume_in_the_same_folder(recipe: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    path = recipe(width=3)
    assert cli.main(["fit", path]) == 0
    captured = capfd.readouterr()
    assert "Tip" not in captured.out + captured.err
    assert "GPU" not in captured.out + captured.err
    assert "Warning" not in captured.err
    run = Path("tb_logs/toy/version_0")
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["width"] == 3
    checkpoint = run / "checkpoints" / "epoch=0-step=4.ckpt"
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["global_step"] == 4
    assert cli.main(["fit", path, "--trainer.max_epochs=2", "--ckpt_path", str(checkpoint)]) == 0
    assert [p.name for p in Path("tb_logs/toy").iterdir()] == ["version_0"]
    assert (run / "checkpoints" / "epoch=1-step=8.ckpt").is_file()
    assert cli.main(["test", path, "--ckpt_path", str(checkpoint)]) == 0


def test_the_recipe_rules_over_the_checkpoint(recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fit", recipe(width=3)]) == 0
    config = Path("tb_logs/toy/version_0/config.yaml")
    before = config.read_bytes()
    checkpoint = "tb_logs/toy/version_0/checkpoints/epoch=0-step=4.ckpt"
    capsys.readouterr()
    message = error_of(capsys, "fit", recipe(width=4), "--ckpt_path", checkpoint)
    assert "expected layer.weight of shape [1, 4] (the recipe's model), but it is [1, 3]" in message
    assert config.read_bytes() == before
    assert cli.main(["fit", recipe(width=3, learning_rate=0.5), "--ckpt_path", checkpoint]) == 0
    assert yaml.safe_load(config.read_text())["model"]["init_args"]["learning_rate"] == 0.5


def test_a_checkpoint_that_holds_objects_is_refused(
    recipe: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = recipe(width=3)
    torch.save({"state_dict": {}, "thing": Path("x")}, "objects.ckpt")
    assert "weights and plain values" in error_of(capsys, "fit", path, "--ckpt_path", "objects.ckpt")
    Path("broken.ckpt").write_bytes(b"not a checkpoint")
    assert "weights and plain values" in error_of(capsys, "fit", path, "--ckpt_path", "broken.ckpt")
    torch.save({"state_dict": {}, "hyper_parameters": {"_class_path": "other.Module"}}, "other.ckpt")
    assert "it holds a other.Module" in error_of(capsys, "fit", path, "--ckpt_path", "other.ckpt")


def _default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupted_fit_ends_in_130(recipe: Callable[..., str], toy: Path) -> None:
    path = recipe(width=3, pause=0.2, trainer={"max_epochs": 500})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(toy)])}
    command = [sys.executable, "-m", "dspark", "fit", path]
    # A test run in the background of a shell inherits an ignored SIGINT; the program under test must not.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment}
    with subprocess.Popen(command, **streams, preexec_fn=_default_interrupt) as run:  # noqa: PLW1509  # one signal reset, no locks
        deadline = time.monotonic() + 120
        while not list(Path("tb_logs").rglob("*.ckpt")) and time.monotonic() < deadline:
            time.sleep(0.1)
        run.send_signal(signal.SIGINT)
        try:
            _, err = run.communicate(timeout=60)
        finally:
            run.kill()  # whatever happened, no process is left behind
    assert run.returncode == cli.INTERRUPTED, err.decode()
    assert (
        err.decode()
        .strip()
        .splitlines()[-1]
        .startswith("interrupted; to resume, run the same command with --ckpt_path")
    )
    assert b"Traceback" not in err


def test_predictions_become_one_record_a_block() -> None:
    from dspark.lightning_cli import records_of

    batch = {"logits": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "domain": ["a", "b"]}
    assert list(records_of([batch, None])) == [
        {"logits": [1.0, 2.0], "domain": "a"},
        {"logits": [3.0, 4.0], "domain": "b"},
    ]


@pytest.mark.parametrize(("name", "owner"), [("ablate", "ablate"), ("prepare", "prepare"), ("rollout", "rollout")])
def test_another_verbs_recipe_is_told_apart(name: str, owner: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "recipes" / f"{name}.yaml")
    assert cli.main(["validate", path]) == 2
    assert f"`dspark {owner} {path}`" in capsys.readouterr().err


def test_the_page_lists_recipes_of_its_own_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(["fit", "--help"]) == 0
    page = capsys.readouterr().out
    assert "recipes/drafter.yaml" in page
    assert not any(f"recipes/{other}.yaml" in page for other in ("ablate", "prepare", "rollout"))


def test_a_choice_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "recipes" / "drafter.yaml")
    assert cli.main(["fit", path, "--model.init_args.drafter.markov_head=foo"]) == 2
    said = capsys.readouterr().err
    assert "one of vanilla, gated, rnn, pair" in said
    assert "typing" not in said


def test_predict_of_the_draft_model_says_what_to_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["predict", str(ROOT / "recipes" / "drafter.yaml"), "--trainer.logger=false"]
    argv += [f"--trainer.default_root_dir={tmp_path}"]
    assert cli.main(argv) == 2
    assert "use `dspark rollout`" in capsys.readouterr().err


def test_a_fit_ends_with_the_next_command(recipe: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    callbacks = [{"class_path": "dspark.training.callbacks.LastCheckpoint"}]
    path = recipe(trainer={"callbacks": callbacks, "default_root_dir": "out", "max_steps": 1})
    assert cli.main(["fit", path, "--model.init_args.width=3"]) == 0
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("checkpoint: out/last.ckpt; next: ")
    assert last.endswith(f"test {path} --model.init_args.width=3 --ckpt_path out/last.ckpt")


@pytest.mark.parametrize("name", ["ablate", "compare"])
def test_pages_of_what_takes_long_or_asks_for_much_say_so(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert "\nNeeds: " in page
    assert "Costs" in page
