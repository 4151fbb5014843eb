"""The cache of features: the same weights as without it, bit for bit, and every way a file or a disk can be wrong."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.training.data import TrajectoryDataModule
from dspark.training.features import FeatureCache, FeatureStore, Said, size_text
from dspark.training.frozen import capture
from dspark.training.labels import normalise_at

Usage = namedtuple("Usage", "total used free")


def fit(tiny: Any, data_dir: Path, root: Path, steps: int = 9, **options: Any) -> tuple[Any, Any]:
    """Nine steps are two epochs of four batches and a bit."""
    data = TrajectoryDataModule([str(data_dir)], val=[str(data_dir)], token_budget=60, anchors_per_sequence=4)
    kind = {"total_steps": 9, "regression": 7, "input_fusion": True, **options.pop("module", {})}
    module = tiny.make_module(**kind)
    trainer = tiny.make_trainer(root, steps, val_check_interval=2, **options)
    trainer.fit(module, data)
    return module, trainer


def same_weights(one: Any, other: Any) -> bool:
    pairs = zip(one.drafter.state_dict().values(), other.drafter.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def said(features: torch.Tensor, hidden: torch.Tensor) -> Said:
    return Said(features, hidden, torch.zeros(len(hidden)), torch.zeros(len(hidden), dtype=torch.int64))


def batch_of(data_dir: Path) -> Any:
    return next(iter(TrajectoryDataModule([str(data_dir)], token_budget=60).train_dataloader()))


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_training_gives_the_weights_of_online_training(
    tiny: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Written, and read again by a second run whose target is never asked."""
    target = tiny.make_target(dtype)
    monkeypatch.setattr("dspark.training.frozen.load_target", lambda *_: target)
    online, plain = fit(tiny, data_dir, tmp_path / "online")
    cache = {"features": {"cache": str(tmp_path / "cache")}}
    writing, _ = fit(tiny, data_dir, tmp_path / "writing", module=cache)
    monkeypatch.setattr(target, "forward_sequences", None)  # to call it would be an error
    reading, trainer = fit(tiny, data_dir, tmp_path / "reading", module=cache)
    assert same_weights(online, writing)
    assert same_weights(online, reading)
    assert not same_weights(online, tiny_start(tiny, online))
    assert plain.callback_metrics.keys() == trainer.callback_metrics.keys()
    for name, value in plain.callback_metrics.items():
        assert torch.equal(trainer.callback_metrics[name], value), name
    assert len(files(tmp_path / "cache")) == 12
    tally = reading.cache.tallies
    assert (tally[True].made, tally[False].made, tally[True].damaged) == (0, 0, 0)
    assert tally[True].hits > 24
    assert tally[False].hits > 24
    made = writing.cache.tallies
    assert made[True].made + made[False].made == 12
    assert made[True].written + made[False].written == sum(f.stat().st_size for f in files(tmp_path / "cache"))


def test_known_normalisers_leave_the_rest_of_the_head_out(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reduced draft vocabulary, features from the folder: the same weights, and no step reads the whole LM head."""
    for name, extra in (("online", {}), ("writing", {"features": {"cache": str(tmp_path / "cache")}})):
        module, _ = fit(tiny, data_dir, tmp_path / name, module={"draft_vocab_size": 17, **extra})
        if name == "online":
            online = module
    assert same_weights(online, module)
    widths: list[int] = []
    say = target.logits

    def logits(hidden: Any, head: Any = None) -> Any:
        widths.append((say(hidden, head)).shape[-1])
        return say(hidden, head)

    monkeypatch.setattr(target, "logits", logits)
    module, _ = fit(tiny, data_dir, tmp_path / "reading", module={"draft_vocab_size": 17, **extra})
    assert same_weights(online, module)
    assert set(widths) == {17}
    extra["losses"] = {"temperature": 0.5}
    other, _ = fit(tiny, data_dir, tmp_path / "warm", module={"draft_vocab_size": 17, **extra})
    assert not same_weights(online, other)
    assert max(widths) > 17  # its normaliser is another one


def tiny_start(tiny: Any, like: Any) -> Any:
    from dspark.drafter.model import Drafter

    return type("Start", (), {"drafter": Drafter(like.config, seed=like.seed)})


def test_online_training_writes_nothing(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    module, _ = fit(tiny, data_dir, tmp_path / "run", steps=1)
    assert module.cache is None
    assert files(tmp_path) == []


def test_partly_known_batches_equal_the_targets_word(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    """Every subset of a batch may be missing: what comes back is what one pass over all of it gives."""
    batch = batch_of(data_dir)
    assert len(batch.sample_ids) == 3
    wanted = capture(target, batch, (0, 2))
    for known in range(8):
        cache = FeatureCache(tmp_path / str(known), target, (0, 2))
        for r, ids in enumerate(batch.sequences()):
            if known >> r & 1:
                rows = slice(int(batch.offsets[r]), int(batch.offsets[r + 1]))
                parts = (wanted.features, wanted.hidden, *normalise_at(target.logits, wanted.hidden))
                cache.store.write(ids, Said(*(part[rows] for part in parts)))
        seen = cache.capture(batch)
        assert cache.tallies[False].hits == known.bit_count()
        for name in ("hidden", "features", "finite"):
            assert torch.equal(getattr(seen, name), getattr(wanted, name)), (known, name)
        assert torch.equal(seen.normaliser, normalise_at(target.logits, wanted.hidden)[0])


def test_two_taps_dtypes_and_targets_share_a_folder(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    batch, root = batch_of(data_dir), tmp_path / "cache"
    others = {
        "taps": FeatureCache(root, target, (1, 2)),
        "order": FeatureCache(root, target, (2, 0)),
        "dtype": FeatureCache(root, tiny.make_target(torch.bfloat16), (0, 2)),
        "target": FeatureCache(root, target.remade(lambda name, t: t * 1.5), (0, 2)),
    }
    FeatureCache(root, target, (0, 2)).capture(batch)
    for name, cache in others.items():
        seen, wanted = cache.capture(batch), capture(cache.target, batch, cache.taps)
        assert cache.tallies[False].hits == 0, name
        assert torch.equal(seen.features, wanted.features), name
    assert len(list(root.iterdir())) == 5


def test_a_folder_of_something_else_is_refused(target: Any, data_dir: Path, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, target, (0, 2))
    cache.capture(batch_of(data_dir))
    file = cache.store.folder / "identity.json"
    file.write_text(file.read_text().replace("float32", "float16"))
    with pytest.raises(DsparkError, match="Remove that folder"):
        FeatureCache(tmp_path, target, (0, 2))


def damage(kind: str, file: Path, other: Path) -> None:
    data = bytearray(file.read_bytes())
    if kind == "bit":
        data[-3] ^= 1
    new = {"cut": data[:-4], "empty": b"", "header": data[:12], "text": b"not a tensor", "bit": data}.get(kind)
    file.write_bytes(other.read_bytes() if new is None else bytes(new))


@pytest.mark.parametrize("kind", ["cut", "empty", "header", "text", "bit", "other sequence"])
def test_a_damaged_file_is_made_again_loudly(
    target: Any, data_dir: Path, tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    batch = batch_of(data_dir)
    first = FeatureCache(tmp_path, target, (0, 2))
    wanted = first.capture(batch)
    file, other = (first.store.path(first.store.key(ids)) for ids in batch.sequences()[:2])
    whole = file.read_bytes()
    damage(kind, file, other)
    assert file.read_bytes() != whole
    cache = FeatureCache(tmp_path, target, (0, 2))
    seen = cache.capture(batch)
    assert torch.equal(seen.features, wanted.features)
    assert torch.equal(seen.hidden, wanted.hidden)
    assert (cache.tallies[False].damaged, cache.tallies[False].made, cache.tallies[False].hits) == (1, 1, 2)
    assert file.name in caplog.text
    assert "made again" in caplog.text
    again = FeatureCache(tmp_path, target, (0, 2))
    assert torch.equal(again.capture(batch).features, wanted.features)
    assert again.tallies[False].hits == 3


def test_a_pair_of_another_length_is_neither_kept_nor_read(target: Any, data_dir: Path, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path, target, (0, 2))
    ids = torch.arange(5)
    with pytest.raises(AssertionError, match="captured lengths"):
        store.write(ids, said(torch.zeros(4, 32), torch.zeros(4, 16)))
    short = FeatureStore(tmp_path, target, (0, 2))
    short.write(ids, said(torch.zeros(5, 16), torch.zeros(5, 16)))  # the width of one tap
    with pytest.raises(ValueError, match="another sequence's length"):
        store.read(ids)


def test_a_place_that_cannot_be_written_stops_the_run(tiny: Any, target: Any, data_dir: Path, tmp_path: Path) -> None:
    """No warnings and exit code 0."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DsparkError, match="can be written"):
        fit(tiny, data_dir, tmp_path / "run", module={"features": {"cache": str(tmp_path / "file" / "below")}})


def test_the_size_is_told_before_anything_is_written(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Sum of lengths x ((taps + 1) x hidden size x bytes + 12); refused without room, and then nothing is there."""
    data = TrajectoryDataModule([str(data_dir)])
    need = sum(len(s.ids) for s in data.samples("train")) * (3 * 16 * 4 + 12)
    cache = {"features": {"cache": str(tmp_path / "cache")}}
    spare = (1 << 30) + need // 10
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, need + spare - 1))
    with pytest.raises(DsparkError, match=r"features.cache: expected room for .* leave features.cache out"):
        fit(tiny, data_dir, tmp_path / "run", module=cache)
    assert not (tmp_path / "cache").exists()
    told = capsys.readouterr().err
    assert f"12 sequences, {need // 204} tokens of 204 bytes (2 taps, the last hidden state, two numbers)" in told
    assert f"{size_text(need)}, {size_text(need)} of it still to be written; 1.0 GiB free" in told
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, need + spare))
    fit(tiny, data_dir, tmp_path / "run", module=cache)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))  # all is there: no room is needed
    capsys.readouterr()
    fit(tiny, data_dir, tmp_path / "again", module=cache)
    assert "0 bytes of it still to be written; 0 bytes free" in capsys.readouterr().err


def test_the_run_ends_with_its_hit_rate(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, _ = fit(tiny, data_dir, tmp_path / "run", module={"features": {"cache": str(tmp_path / "cache")}})
    last = capsys.readouterr().err.splitlines()[-1]
    hits = sum(t.hits for t in module.cache.tallies.values())
    assert f"{hits} of {hits + 12} look-ups were hits ({100 * hits / (hits + 12):.1f}%), 12 made" in last
    assert "0 damaged files made again, 0 not finite" in last


def test_no_hit_in_the_second_epoch_is_an_error(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = {"features": {"cache": str(tmp_path / "cache")}}
    write = FeatureStore.write

    def lose(store: FeatureStore, ids: Any, pair: Any) -> int:
        done = write(store, ids, pair)
        store.path(store.key(ids)).unlink()
        return done

    monkeypatch.setattr(FeatureStore, "write", lose)
    fit(tiny, data_dir, tmp_path / "one", steps=4, module=cache)  # a first epoch without hits is normal
    with pytest.raises(DsparkError, match="expected hits in an epoch after the first, but none of 12"):
        fit(tiny, data_dir, tmp_path / "two", module=cache)


def poison(target: Any, monkeypatch: pytest.MonkeyPatch, marked: torch.Tensor) -> list[int]:
    """The target says NaN about sequences that start as `marked`; the list says how often it was asked."""
    real, asked = target.forward_sequences, []

    def forward(sequences: Any, taps: Any) -> Any:
        hidden, features, offsets = real(sequences, taps)
        for r, ids in enumerate(sequences):
            if torch.equal(ids[: len(marked)], marked):
                features[offsets[r]] = float("nan")
                asked.append(r)
        return hidden, features, offsets

    monkeypatch.setattr(target, "forward_sequences", forward)
    return asked


def test_a_sequence_with_nan_is_not_kept_and_the_count_is_logged(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = TrajectoryDataModule([str(data_dir)]).samples("train")[3]
    asked = poison(target, monkeypatch, bad.ids)
    online, plain = fit(tiny, data_dir, tmp_path / "online", steps=8, limit_val_batches=0, module={"share": 0.3})
    assert len(asked) >= 2
    cache = {"share": 0.3, "features": {"cache": str(tmp_path / "cache")}}
    for run in ("writing", "reading"):
        asked.clear()
        module, trainer = fit(tiny, data_dir, tmp_path / run, steps=8, limit_val_batches=0, module=cache)
        assert same_weights(online, module)
        assert float(trainer.callback_metrics["train/skipped"]) == module.skips.skipped == 2
        assert float(plain.callback_metrics["train/skipped"]) == 2
        assert module.cache.tallies[True].broken == len(asked) >= 2  # asked anew in every epoch, never kept
        assert not module.cache.store.path(module.cache.store.key(bad.ids)).exists()
        assert len(files(tmp_path / "cache")) == 11


def test_too_many_nan_sequences_stop_a_cached_run_too(
    tiny: Any, target: Any, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(target, monkeypatch, torch.zeros(0, dtype=torch.int64))  # every sequence
    kind = {"regression": 0, "features": {"cache": str(tmp_path / "cache")}}
    with pytest.raises(DsparkError, match="NaN"):
        fit(tiny, data_dir, tmp_path / "run", module=kind)
    assert files(tmp_path) == []


def test_two_processes_that_write_one_file_do_not_harm_it(target: Any, tmp_path: Path) -> None:
    """And a reader meanwhile sees the whole file or none. Forked: to import everything anew would take most of it."""
    store, ids = FeatureStore(tmp_path / "cache", target, (0, 2)), torch.arange(4000) % 29
    values = torch.arange(4000 * 48, dtype=torch.float32).view(4000, 48)

    def write() -> None:
        torch.set_num_threads(1)  # the parent's threads are not in the fork, and would be waited for
        for _ in range(20):
            store.write(ids, said(values[:, :32], values[:, 32:]))

    writers, reads = [multiprocessing.get_context("fork").Process(target=write) for _ in range(2)], 0
    for writer in writers:
        writer.start()
    late = time.monotonic() + 60
    try:
        while any(writer.is_alive() for writer in writers) or not reads:
            assert time.monotonic() < late, "the writers do not come to an end"
            pair = store.read(ids)
            reads += pair is not None
            assert pair is None or torch.equal(pair[1], values[:, 32:])
        assert [writer.exitcode for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    assert reads > 1
    assert [f for f in tmp_path.rglob("*") if f.name.startswith(".")] == []


def test_sizes_are_told_in_words() -> None:
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 20, 38 << 40)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "5.0 MiB", "38.0 TiB"
    ]  # fmt: skip
