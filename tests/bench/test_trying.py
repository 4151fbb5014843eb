"""The real runner beside the simulation: so many really run at once, and every way gives the same output."""

from __future__ import annotations

import pytest
import torch

from dspark.bench import trying
from dspark.bench.simulated import ways
from dspark.bench.simulation import NONE, Pools, Way
from dspark.bench.timed import timed
from dspark.bench.trying import Trial, engine_of, try_out
from dspark.contracts import DsparkError, Round, SamplingParams
from dspark.rollouts.trajectory import Trajectory, sampling_json
from dspark.runner import Engine
from dspark.runner.curve import CapacityCurve
from tests.runner.conftest import VOCAB, make_drafter, make_target

CURVE = CapacityCurve((1, 8, 64), (1.0, 1.2, 3.0), (1, 8), (0.1, 0.2))
POOLS: Pools = {"chat": [Round(3, (1, 2, 3, 4), 4, 2, (0.9, 0.8, 0.2, 0.1))]}


def trajectory(i: int, length: int) -> Trajectory:
    params = SamplingParams(temperature=0.9, max_tokens=20, seq_seed=i)
    ids = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(i)).tolist()
    return Trajectory(
        f"t{i}", f"p{i}", f"p{i}", "chat", tuple(ids), (1, 2), (-1.0, -1.0), (-1.0, -1.0), "length", None, i, "x",
        sampling_json(params),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trial() -> Trial:
    target = make_target(torch.float32)
    return Trial(target, make_drafter(target), [trajectory(i, n) for i, n in enumerate((5, 60, 31))], 4, 2)


def test_requests_are_repeated_with_noise_of_their_own(trial: Trial) -> None:
    few, domains = trial.batch(1)
    assert len(few) == len(domains) == 4  # at least so many
    assert few[0].prompt_ids == few[3].prompt_ids
    assert few[0].params.seq_seed != few[3].params.seq_seed
    assert len(trial.batch(9)[0]) == 9  # one a user


def test_so_many_users_really_run_at_once(trial: Trial) -> None:
    """Long prompts beside short ones, and several waves: after the first passes there are always three in flight."""
    requests = trial.batch(9)[0]
    run = engine_of(trial, Way("fixed", 4), CURVE, 3, requests).begin(requests)
    flying = []
    with torch.inference_mode():
        while run.busy:
            done = run.round()
            flying.append(len(run.running) + len(done))
            if run.waiting:
                assert flying[-1] == 3
    assert flying[0] == 3
    assert run.prefixes.hits == 0  # equal prompts are there, and not reused


@pytest.mark.slow
def test_rows_of_every_way_and_number_of_users(trial: Trial) -> None:
    told: list[tuple[int, int]] = []
    chosen = ways(4, 0.3)
    rows = try_out(trial, POOLS, CURVE, chosen, [3, 1, 3], lambda done, total, _: told.append((done, total)))
    assert [(r["users"], r["way"]) for r in rows] == [(n, way.title) for n in (1, 3) for way in chosen]
    assert told == [(i + 1, 2 * 7 * 2) for i in range(28)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["simulated"] / row["measured"])
        share = row["measured_per_user"] / row["measured"]
        assert share == pytest.approx(1.0) if row["users"] == 1 else 1 / 3 - 1e-9 < share < 1.0
    expected = {r["way"]: r["simulated"] for r in rows if r["users"] == 1}
    assert expected["fixed 4"] > expected[NONE]


def test_the_median_of_the_repeats(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((1.0, 8.0, 2.0))

    def fake(engine: Engine, requests: list) -> object:
        spent = next(seconds)
        return trying.Timed(timed(engine, requests).completions, spent, 2 * spent)

    monkeypatch.setattr(trying, "timed", fake)
    three = Trial(trial.target, trial.drafter, trial.trajectories, 4, 3)
    (row,) = try_out(three, POOLS, CURVE, [Way(NONE)], [2])
    assert row["measured"] == pytest.approx(2 * row["measured_per_user"])
    assert row["measured"] * 2.0 == pytest.approx(4 * 20)  # four requests of 20 tokens in two seconds


def test_a_policy_that_changes_the_output_is_an_error(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(trial: Trial, way: Way, curve: CapacityCurve, users: int, requests: list) -> Engine:
        target = make_target(torch.float32, seed=1 if way.policy == NONE else 7)
        return Engine(target)

    monkeypatch.setattr(trying, "engine_of", other)
    with pytest.raises(DsparkError, match="fixed 1 at 2 users changed the output"):
        try_out(trial, POOLS, CURVE, ways(4, 0.3), [2])
