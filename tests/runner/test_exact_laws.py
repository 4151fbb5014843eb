"""Losslessness without sampling noise: the law of what is emitted equals the target's, and what would break it is seen
to."""

from __future__ import annotations

import math

import pytest
import torch

from dspark import noise, ops
from dspark.contracts import MTPPredictInfo, SamplingParams
from dspark.runner.curve import CapacityCurve
from dspark.runner.schedule import Scheduler
from tests.runner import exact
from tests.runner.exact import World

EXACT = 2e-6  # fp32 laws
SEEN = 1e-3
SHAPES = {
    "T 1": {"temperature": 1.0},
    "T 0.7": {"temperature": 0.7},
    "T 0": {"temperature": 0.0},
    "T 0, top-k": {"temperature": 0.0, "top_k": 3},
    "top-k": {"temperature": 0.7, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
}
DRAFTS = {
    "whole": {},
    "reduced vocabulary": {"ids": (0, 1, 3)},
    "force_topk 1": {"candidates": 1},
    "force_topk 2": {"candidates": 2},
    "force_topk 4": {"candidates": 4},
    "reduced and 2": {"ids": (0, 2, 3), "candidates": 2},
}
POLICIES = ("fixed 0", "fixed 1", "fixed 2", "threshold", "early_stop", "lagged_global", "global")
OTHERS = [MTPPredictInfo((0, 1), (0.9, 0.5)), MTPPredictInfo((0,), (0.3,))]
CURVE = CapacityCurve((1, 3, 4, 5, 6, 7), (1.0, 1.3, 1.5, 1.65, 1.7, 2.2))  # with a step


STEP = CapacityCurve((1, 2, 3), (1.0, 1.85, 1.86))  # one draft alone does not pay: the second decides over it


def chooser(policy: str):
    """How many drafts of a block are verified, with two other requests in the batch and a past of its own."""
    name, _, count = policy.partition(" ")

    def choose(info: MTPPredictInfo) -> int:
        scheduler = Scheduler(name, int(count or 2), 0.35, CURVE)
        for past in ((0.9, 0.9), (0.2, 0.6)):
            scheduler.lengths([MTPPredictInfo((0, 0), past), *OTHERS])
        return scheduler.lengths([info, *OTHERS])[0]

    return choose


def world(shape: str = "T 1", draft: str = "whole", seed: int = 0, **rest: object) -> World:
    return World(SamplingParams(**SHAPES[shape]), seed=seed, **DRAFTS[draft], **rest)


def rejection(one: World, policy: str) -> exact.Law:
    return exact.run_rejection(one, exact.rejection_paths(one, chooser(policy)))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_and_draft_law(shape: str, draft: str) -> None:
    """At temperature 0 one world has one path, so acceptances and rejections are counted over all worlds."""
    certain = SHAPES[shape]["temperature"] == 0.0
    worlds = [world(shape, draft, seed) for seed in range(12)]
    laws = [(one, rejection(one, "fixed 2")) for one in worlds]
    tested = laws if certain else [(one, law) for one, law in laws if _conclusive(law)][:4]
    assert len(tested) >= 3, "too few cases in which drafts are accepted and rejected"
    for counted in ([law for _, law in tested], [exact.run_coupled(one, chooser("fixed 2")) for one, _ in tested]):
        _say_something(counted)
        assert max(law.off(one) for law, (one, _) in zip(counted, tested, strict=True)) < EXACT
    if certain:
        for one, _ in tested:
            assert exact.run_coupled(one, chooser("fixed 2"), "greedy").off(one) < EXACT


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("global", "fixed 0")])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", ["whole", "reduced vocabulary", "force_topk 2"])
def test_every_policy_under_rejection(shape: str, draft: str, policy: str) -> None:
    """The engine refuses `global` here; a test below shows why. Both lengths must occur where the policy chooses."""
    lengths, laws = set(), []
    for seed in range(8):
        one = world(shape, draft, seed)
        paths = exact.rejection_paths(one, chooser(policy))
        lengths |= {path.length for path in paths}
        laws.append(exact.run_rejection(one, paths))
        assert laws[-1].off(one) < EXACT
    _say_something(laws)
    assert policy.startswith("fixed") or len(lengths) > 1, "inconclusive: always the same length"


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "fixed 0"])
@pytest.mark.parametrize(("shape", "draft"), [("T 1", "whole"), ("top-p", "force_topk 2"), ("T 0", "whole")])
def test_every_policy_under_coupling(policy: str, shape: str, draft: str) -> None:
    lengths, laws = set(), []
    for seed in range(8):
        one = world(shape, draft, seed)
        choose = chooser(policy)
        lengths |= {choose(MTPPredictInfo(d, exact.confidences(one, d))) for d in ((0, 0), (1, 0), (2, 0), (3, 0))}
        laws.append(exact.run_coupled(one, choose))
        assert laws[-1].off(one) < EXACT
        if shape == "T 0":
            assert exact.run_coupled(one, choose, "greedy").off(one) < EXACT
    _say_something(laws)
    assert policy.startswith("fixed") or len(lengths) > 1, "inconclusive: always the same length"


def test_nothing_verified_is_plain_decoding() -> None:
    one = world()
    law = rejection(one, "fixed 0")
    assert law.drafted == 0
    assert law.off(one) < EXACT


def test_the_papers_appendix_a() -> None:
    """Target 0.7 / 0.3, draft 0.5 / 0.5. A cut by what the draft was (here: verify token 0, do not look at token 1)
    emits 0.85 / 0.15; the retrospective policy makes such cuts, where a step in the curve makes the second draft decide
    over the first; early_stop does not."""
    target, draft = torch.tensor([0.7, 0.3, 0.0, 0.0]), torch.tensor([0.5, 0.5, 0.0, 0.0])

    class Appendix(World):
        def target(self, prefix: exact.Prefix) -> torch.Tensor:
            return target

        def draft(self, prefix: exact.Prefix) -> torch.Tensor:
            return draft

    one = Appendix(SamplingParams(), ids=(0, 1))

    def lengths(policy: str):
        def choose(info: MTPPredictInfo) -> int:
            second = 0.95 if info.token_ids[0] == 0 else 0.05
            return Scheduler(policy, 2, 0.0, STEP).lengths([MTPPredictInfo(info.token_ids, (0.8, second))])[0]

        return choose

    law = exact.run_rejection(one, exact.rejection_paths(one, lengths("global")))
    first = [sum(p for tokens, p in law.of.items() if tokens[0] == v) for v in (0, 1)]
    assert first == pytest.approx([0.85, 0.15], abs=1e-6)
    assert law.distance(one) > SEEN
    assert exact.run_coupled(one, lengths("global")).distance(one) < EXACT
    paths = exact.rejection_paths(one, lengths("early_stop"))
    assert {path.length for path in paths} == {0}, "where one draft alone does not pay it admits none, whatever is next"
    assert exact.run_rejection(one, paths).off(one) < EXACT


def test_global_breaks_rejection_in_general_too() -> None:
    def alone(info: MTPPredictInfo) -> int:
        return Scheduler("global", 2, curve=STEP).lengths([info])[0]

    worst = 0.0
    for seed in range(16):
        one = world(seed=seed)
        law = exact.run_rejection(one, exact.rejection_paths(one, alone))
        worst = max(worst, law.distance(one) if _conclusive(law) else 0.0)
    assert worst > SEEN


def test_a_head_that_knows_the_drafted_token_breaks_rejection() -> None:
    """Why the engine refuses to schedule by confidence_with_law there: a threshold on the drafted token's own odds."""
    one = world()

    def choose(info: MTPPredictInfo) -> int:
        return int(float(one.draft(())[info.token_ids[0]]) > 0.2) * 2

    paths = exact.rejection_paths(one, choose)
    assert {path.length for path in paths} == {0, 2}
    assert exact.run_rejection(one, paths).distance(one) > SEEN
    assert exact.run_coupled(one, choose).distance(one) < EXACT


@pytest.mark.parametrize("shape", ["top-k", "top-p", "T 0.7"])
def test_a_wrong_q_is_seen(shape: str) -> None:
    """Verification is told the law before truncation and temperature: what several engines did."""
    worst = 0.0
    for seed in range(8):
        one, plain = world(shape, seed=seed), world("T 1", seed=seed)
        law = exact.run_rejection(one, exact.rejection_paths(one, chooser("fixed 2")), said=plain.draft)
        worst = max(worst, law.distance(one) if _conclusive(law) else 0.0)
    assert worst > SEEN


def test_shared_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual drawn with the draft's own noise, a known bug of others. The real streams differ."""
    streams = [noise.TARGET, noise.ACCEPT, noise.RESIDUAL, *(noise.draft_stream(slot) for slot in range(16))]
    assert len(set(streams)) == len(streams)
    monkeypatch.setattr(noise, "RESIDUAL", noise.DRAFT)
    one = world()
    assert rejection(one, "fixed 2").distance(one) > SEEN


@pytest.mark.parametrize("draft", DRAFTS)
def test_acceptance_is_what_the_formulas_say(draft: str) -> None:
    """First slot: sum of min(p, q) for rejection, sum over v of 1 / sum_u max(p_u / p_v, q_u / q_v) for coupling."""
    for seed in range(3):
        one = world(draft=draft, seed=seed)
        p, q = one.target(()).double(), one.draft(()).double()
        law = rejection(one, "fixed 1")
        assert law.accepted == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)
        both = [v for v in range(4) if p[v] > 0 and q[v] > 0]
        wanted = sum(1 / float(torch.maximum(p / p[v], q / q[v]).sum()) for v in both)
        assert exact.run_coupled(one, chooser("fixed 1")).accepted == pytest.approx(wanted, abs=1e-6)


def test_the_joint_law_is_that_of_the_noise() -> None:
    """The closed form the tests stand on, against the generator itself."""
    q, p = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.4, 0.3, 0.2])
    joint = exact.shared(q.double(), p.double())
    torch.testing.assert_close(joint.sum(1), q.double())
    torch.testing.assert_close(joint.sum(0), p.double())
    n = 40000
    seeds, at = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    pairs = [ops.gumbel_argmax(law.repeat(n, 1), seeds, noise.TARGET, at) for law in (q, p)]
    counts = torch.bincount(pairs[0] * 4 + pairs[1], minlength=16).view(4, 4) / n
    assert (counts - joint).abs().max() < 4 * math.sqrt(0.25 / n)


def _say_something(laws: list[exact.Law]) -> None:
    for name in ("drafted", "accepted", "rejected"):
        assert sum(getattr(law, name) for law in laws) > 0, f"inconclusive: nothing was {name}"


def _conclusive(law: exact.Law) -> bool:
    return min(law.drafted, law.accepted, law.rejected) > 1e-9
