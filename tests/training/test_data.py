"""Batches, their order, resumable streams, splits and damaged directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.contracts import DsparkError
from dspark.training.batches import BatchPlan, TrainStream, partition
from dspark.training.data import RoundsDataModule, TrajectoryDataModule, draw_anchors, sequence_batch
from dspark.training.sources import read_samples


def flat(groups: list[list[int]]) -> list[int]:
    return sorted(i for group in groups for i in group)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 7, 23])
def test_ranks_share_every_epoch_and_have_the_same_length(world: int, count: int) -> None:
    plans = [BatchPlan([5 + i % 4 for i in range(count)], 12, rank=r, world_size=world) for r in range(world)]
    for epoch in (0, 1):
        groups = [p.epoch(epoch) for p in plans]
        assert {len(g) for g in groups} == {len(plans[0])}
        assert flat([b for g in groups for b in g]) == list(range(count))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    sizes = [3] * 20
    one, other = BatchPlan(sizes, 9, seed=1), BatchPlan(sizes, 9, seed=2)
    assert one.epoch(3) == BatchPlan(sizes, 9, seed=1).epoch(3)
    assert one.epoch(3) != one.epoch(4)
    assert one.epoch(3) != other.epoch(3)


def test_partition_is_even_and_keeps_the_order() -> None:
    groups = partition([4, 4, 4, 4, 4, 4], [5, 3, 1, 0, 2, 4], 3)
    assert groups == [[5, 3], [1, 0], [2, 4]]


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 9])
def test_a_stream_goes_on_where_it_stopped(cut: int) -> None:
    def run(stream: TrainStream, batches: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < batches:
            for item in stream:
                seen.append(item)
                if len(seen) == batches:
                    break
        return seen

    def make() -> TrainStream:
        return TrainStream(BatchPlan([3] * 12, 9, seed=5), lambda epoch, group: (epoch, group))

    whole = run(make(), 11)
    first, second = make(), make()
    start = run(first, cut)
    second.load_state_dict(first.state_dict())
    assert start + run(second, 11 - cut) == whole


def test_anchors_depend_on_seed_epoch_and_sample_only(data_dir: Path) -> None:
    samples = read_samples([str(data_dir)]).samples
    first = draw_anchors(samples[0], 3, seed=1, epoch=2)
    assert len(first) == 3
    assert torch.equal(first, first.sort().values)
    assert torch.equal(first, draw_anchors(samples[0], 3, seed=1, epoch=2))
    draws = {tuple(draw_anchors(samples[0], 3, seed=1, epoch=e).tolist()) for e in range(8)}
    assert len(draws) > 1
    everything = draw_anchors(samples[0], 0, seed=1, epoch=0)
    assert len(everything) == int(samples[0].loss_mask.sum()) - 1


def test_batch_is_flat_and_positions_restart(data_dir: Path) -> None:
    module = TrajectoryDataModule([str(data_dir)], token_budget=60)
    batches = list(module.train_dataloader())
    assert sum(len(b.sample_ids) for b in batches) == 12
    batch = batches[0]
    assert len(batch.sample_ids) > 1
    for r, sequence in enumerate(batch.sequences()):
        rows = slice(int(batch.offsets[r]), int(batch.offsets[r + 1]))
        assert torch.equal(batch.positions()[rows], torch.arange(len(sequence)))
    assert bool(batch.loss_mask[batch.offsets[batch.sequence] + batch.anchors].all())


def test_an_empty_batch_has_no_sequence_and_no_block() -> None:
    batch = sequence_batch([], [])
    assert (len(batch.ids), len(batch.anchors), batch.offsets.tolist()) == (0, 0, [0])
    assert batch.sequences() == []


def test_response_counts_leave_the_prompt_out(tiny: Any, tmp_path: Path) -> None:
    rows = tiny.make_rows(2)
    for row in rows:
        row["prompt_ids"], row["response_ids"] = [7] * 4, [9, 9, 3]
    module = TrajectoryDataModule([str(tiny.write_directory(tmp_path / "d", rows=rows))])
    counts = module.response_counts(29)
    assert (int(counts[9]), int(counts[3]), int(counts[7])) == (4, 2, 0)
    assert module.stop_ids() == [3]
    with pytest.raises(DsparkError, match="another tokenizer"):
        module.response_counts(8)


def test_an_empty_answer_is_left_out_and_counted(tiny: Any, tmp_path: Path) -> None:
    rows = tiny.make_rows(3)
    rows[1]["response_ids"] = []
    read = read_samples([str(tiny.write_directory(tmp_path / "d", rows=rows))])
    assert len(read.samples) == 2
    assert read.dropped == {"no supervised token": 1}


def test_nothing_usable_is_refused(tiny: Any, tmp_path: Path) -> None:
    rows = tiny.make_rows(1)
    rows[0]["response_ids"] = []
    with pytest.raises(DsparkError, match="supervised"):
        read_samples([str(tiny.write_directory(tmp_path / "d", rows=rows))])


def test_a_missing_path_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match="nowhere"):
        read_samples([str(tmp_path / "nowhere")])


def test_a_changed_shard_is_refused(data_dir: Path) -> None:
    shard = data_dir / "trajectories-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(DsparkError, match="hash"):
        read_samples([str(data_dir)])


@pytest.mark.parametrize(
    "manifest", [{}, {"state": "running", "shards": []}, [1], {"state": "complete", "shards": [{}]}]
)
def test_an_unfinished_or_foreign_manifest_is_refused(data_dir: Path, manifest: Any) -> None:
    (data_dir / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DsparkError):
        read_samples([str(data_dir)])


def test_only_untruncated_rounds_are_labels(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tiny.make_rows(2)
    rounds = tiny.make_rounds(rows)
    assert len(rounds) > 2
    rounds[0]["verified"] = 1
    rounds[0]["accepted"] = 0
    monkeypatch.setattr(tiny, "make_rounds", lambda _: rounds)
    module = RoundsDataModule([str(tiny.write_directory(tmp_path / "d", rows=rows))])
    (batch,) = module.train_dataloader()
    assert len(batch.anchors) == len(rounds) - 1
    assert batch.drafted.shape == (len(rounds) - 1, 3)
    assert set(batch.conversations) <= {"p0", "p1"}
    assert all(int(v) == 3 for v in batch.verified)


def test_conversations_are_samples_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken rows are counted and set aside in the run's folder, one reason each."""
    from dspark.corpus.dialogue import Dialogue

    monkeypatch.setattr(
        "dspark.corpus.conversations.dialogue.encode_turns",
        lambda messages, tokenizer, **_: [Dialogue((1, 2, 3, 4), (False, False, True, True))],
    )
    path = tmp_path / "talk.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(json.dumps(good) + "\nno json\n" + json.dumps({"messages": []}) + "\n")
    read = read_samples([str(path)], tokenizer=object(), quarantine=tmp_path / "aside")
    assert [s.loss_mask.tolist() for s in read.samples] == [[False, False, True, True]]
    assert sum(read.dropped.values()) == 2
    aside = [json.loads(line) for line in (tmp_path / "aside" / "0-talk.jsonl.quarantine.jsonl").open()]
    assert [(row["line"], bool(row["reason"])) for row in aside] == [(2, True), (3, True)]
    assert "quarantine.jsonl" in " ".join(read.dropped)
    with pytest.raises(DsparkError, match="tokenizer"):
        read_samples([str(path)])


def test_train_prompts_leaves_the_other_prompts_out_of_training_only(tiny: Any, tmp_path: Path) -> None:
    """Of every sample of a prompt, or of none; validation sees all."""
    rows = [{**row, "prompt_id": f"p{i // 2}"} for i, row in enumerate(tiny.make_rows(8))]
    path = str(tiny.write_directory(tmp_path / "rows", rows=rows))
    data = TrajectoryDataModule([path], val=[path], token_budget=60, train_prompts=3)
    assert [s.prompt_id for s in data.samples("train")] == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert len(data.samples("val")) == 8
    with pytest.raises(DsparkError, match="train_prompts >= 0"):
        TrajectoryDataModule([path], train_prompts=-1)
