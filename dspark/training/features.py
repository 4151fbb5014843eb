"""A folder that remembers what the target says about training sequences: asked once, read ever after.

    <cache>/<identity>/identity.json        the target (fingerprint, dtype, device), the taps: what the bits belong to
    <cache>/<identity>/<kk>/<key>.safetensors   one sequence: features [S, n*H], hidden [S, H],
                                               normaliser and argmax [S] of its logits, hashed
Off by default: the states are large (terabytes for a large target and corpus), so the size is told, and held against
the disk, before anything is written. A target's bits do not depend on the batch, so what is read equals what a step
would have captured, and so do the weights that are trained on it. Sequences with NaN or infinity are never kept.
Processes may share a folder: files appear whole, by a rename, and equal keys have equal contents.
Left out on purpose: a copy in memory (the system's file cache is one), removing old files, compression.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.files import atomic_write, canonical_json, read_json, sha256_json, tensor_hash
from dspark.target.decoder import Target
from dspark.training.batches import SequenceBatch
from dspark.training.frozen import Capture, capture_sequences
from dspark.training.labels import normalise_at

FORMAT = "dspark-features/2"
_SPARE = 1 << 30  # bytes of the disk that stay free: checkpoints and logs go there too
_log = logging.getLogger(__name__)


class Said(NamedTuple):
    """What the target says about one sequence: features [S, n*H], hidden [S, H], normaliser [S] fp32 and argmax [S]
    int64 of the logits. The last two are what a step would need the whole LM head for."""

    features: Tensor
    hidden: Tensor
    normaliser: Tensor
    argmax: Tensor


@dataclass(slots=True)
class Tally:
    """Sequences looked up: read from the folder, made by the target and kept, made but not finite; and of those made,
    how many stood in a damaged file. written: bytes."""

    hits: int = 0
    made: int = 0
    broken: int = 0
    damaged: int = 0
    written: int = 0

    @property
    def seen(self) -> int:
        return self.hits + self.made + self.broken

    def tensor(self) -> Tensor:
        """[5] int64, so that ranks can add theirs up."""
        return torch.tensor(astuple(self), dtype=torch.int64)


class FeatureStore:
    """The files of one target's features in `root`. Raises DsparkError when the folder belongs to something else."""

    def __init__(self, root: str | Path, target: Target, taps: tuple[int, ...]):
        self.dtype, self.widths = target.dtype, (len(taps) * target.hidden_size, target.hidden_size)
        self.identity = {
            "format": FORMAT,
            "target": target.fingerprint,
            "dtype": str(target.dtype),
            "device": target.embed_weight.device.type,
            "taps": list(taps),
        }
        self._digest = sha256_json(self.identity)
        self.folder = Path(root) / self._digest[:16]
        self._check_identity()

    def _check_identity(self) -> None:
        file = self.folder / "identity.json"
        if file.exists() and (found := read_json(file, "feature cache")) != self.identity:
            raise DsparkError(f"{file}: expected {self.identity}, but got {found}. Remove that folder.")

    def row_bytes(self) -> int:
        """Bytes a token takes."""
        return sum(self.widths) * self.dtype.itemsize + torch.float32.itemsize + torch.int64.itemsize

    def key(self, ids: Tensor) -> str:
        """sha256 over target, dtype, taps and the token ids [S]."""
        return hashlib.sha256(f"{self._digest}{tensor_hash(ids)}".encode()).hexdigest()

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def read(self, ids: Tensor) -> Said | None:
        """What the target says about ids [S]; None when it was not asked yet. Raises ValueError for a damaged file."""
        key = self.key(ids)
        path = self.path(key)
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata, said = file.metadata() or {}, Said(*(file.get_tensor(name) for name in Said._fields))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: {error}") from error
        shapes = (*((len(ids), width) for width in self.widths), (len(ids),), (len(ids),))
        if tuple(t.shape for t in said) != shapes or metadata != _metadata(key, said):
            raise ValueError(f"{path}: another sequence's length, or other bytes than were written")
        return said

    def write(self, ids: Tensor, said: Said) -> int:
        """Keeps `said` for ids [S] and returns its bytes. Raises DsparkError when the place cannot be written."""
        key, kept = self.key(ids), Said(*(tensor.cpu().contiguous() for tensor in said))
        assert {len(tensor) for tensor in kept} == {len(ids)}, "captured lengths differ from the sequence's length"
        data = save(kept._asdict(), _metadata(key, kept))
        identity = self.folder / "identity.json"
        if not identity.exists():
            atomic_write(identity, canonical_json(self.identity) + "\n")
        atomic_write(self.path(key), data)
        return len(data)


def _metadata(key: str, said: Said) -> dict[str, str]:
    return {"key": key} | {name: tensor_hash(tensor) for name, tensor in said._asdict().items()}


class FeatureCache:
    """`capture` through a FeatureStore. tallies: of the training steps (True) and of everything else (False)."""

    def __init__(self, root: str | Path, target: Target, taps: tuple[int, ...]):
        self.store, self.target, self.taps = FeatureStore(root, target, taps), target, taps
        self.tallies = {True: Tally(), False: Tally()}

    @torch.no_grad()
    def capture(self, batch: SequenceBatch, step: bool = False) -> Capture:
        """As frozen.capture; the target runs on the sequences that no file holds, in one pass."""
        tally, sequences = self.tallies[step], batch.sequences()
        known = [self._read(ids, tally) for ids in sequences]
        finite = torch.ones(len(sequences), dtype=torch.bool)
        missing = [i for i, said in enumerate(known) if said is None]
        if missing:
            made, finite[missing] = self._ask([sequences[i] for i in missing], tally)
            for i, said in zip(missing, made, strict=True):
                known[i] = said
        whole = Said(*(torch.cat(parts).to(batch.ids.device) for parts in zip(*known, strict=True)))
        return Capture(whole.hidden, whole.features, finite, whole.normaliser, whole.argmax)

    def _read(self, ids: Tensor, tally: Tally) -> Said | None:
        try:
            said = self.store.read(ids)
        except ValueError as error:
            tally.damaged += 1
            _log.warning("feature cache: a damaged file is made again: %s", error)
            return None
        tally.hits += said is not None
        return said

    def _ask(self, sequences: list[Tensor], tally: Tally) -> tuple[list[Said], Tensor]:
        """What the target says about R sequences, finite ones kept: (pairs, finite [R] bool)."""
        seen, lengths = capture_sequences(self.target, sequences, self.taps), [len(s) for s in sequences]
        flat = Said(seen.features, seen.hidden, *normalise_at(self.target.logits, seen.hidden))
        made = [Said(*parts) for parts in zip(*(tensor.split(lengths) for tensor in flat), strict=True)]
        for ids, said, finite in zip(sequences, made, seen.finite.tolist(), strict=True):
            if finite:
                tally.made, tally.written = tally.made + 1, tally.written + self.store.write(ids, said)
            else:
                tally.broken += 1
        return made, seen.finite

    def plan(self, sequences: Iterable[Tensor]) -> tuple[str, str]:
        """What keeping these sequences takes: (a line that says it, why it cannot be done or "")."""
        lengths = {self.store.key(ids): len(ids) for ids in sequences}
        total, row = sum(lengths.values()), self.store.row_bytes()
        need = row * sum(size for key, size in lengths.items() if not self.store.path(key).exists())
        free = shutil.disk_usage(_existing(self.store.folder)).free
        line = (
            f"feature cache {self.store.folder}: {len(lengths)} sequences, {total} tokens of {row} bytes "
            f"({len(self.taps)} taps, the last hidden state, two numbers): {size_text(total * row)}, {size_text(need)} "
            f"of it still to be written; {size_text(free)} free"
        )
        if need + need // 10 + _SPARE <= free or not need:
            return line, ""
        return line, (
            f"features.cache: expected room for {size_text(need)} and {size_text(need // 10 + _SPARE)} to spare in "
            f"{self.store.folder}, but {size_text(free)} are free. Use another disk, fewer sequences or taps, or leave "
            "features.cache out: then nothing is stored."
        )


def size_text(size: float) -> str:
    """A number of bytes for people: 1536 -> "1.5 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "bytes" else f"{int(size)} bytes"
        size /= 1024
    return f"{size:.1f} TiB"


def _existing(path: Path) -> Path:
    """The path itself or its nearest parent that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
