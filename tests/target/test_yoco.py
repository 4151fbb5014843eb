"""The decoder-decoder target: its arithmetic against plain torch, its bits in any company, and bounded replay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dspark.contracts import DsparkError, Request, SamplingParams
from dspark.runner import Engine, EngineOptions
from dspark.target.cache import KVCache
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.weights import random_weights
from tests.runner.conftest import VOCAB, counts, make_drafter, make_target, outputs

WINDOW, LAYERS, CONSUMERS, HEADS, DIM = 5, 6, 4, 3, 8
CONFIG = {
    "architectures": ["YocoForCausalLM"], "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": LAYERS, "num_consumer_layers": CONSUMERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 1, "head_dim": DIM, "max_position_embeddings": 256, "sliding_window": WINDOW,
}  # fmt: skip


def make_yoco(dtype: torch.dtype = torch.float32) -> Target:
    config = read_config(CONFIG)
    return Target(config, random_weights(config, 1, dtype, scale=0.35))


def plain(target: Target, ids: torch.Tensor, cut: int = 0) -> torch.Tensor:
    """Logits [S, V] in fp64, with masks written out. cut: consumers' own windows see nothing before it."""
    w = {name: tensor.double() for name, tensor in target.tensors()}
    s, eps = len(ids), target.config.rms_norm_eps
    at = torch.arange(s)
    causal = at[:, None] >= at
    near = causal & (at[:, None] - at < WINDOW)
    cos, sin = (t.double() for t in target._rope.at(at))

    def norm(x, name):
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w[name]

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)

    def attend(q, k, v, mask):
        q, k, v = (x.transpose(0, 1) for x in (q, k.expand(s, HEADS, DIM), v.expand(s, HEADS, DIM)))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).reshape(s, -1)

    x, shared = w["embed"][ids], None
    for i in range(LAYERS):
        n = f"layers.{i}."
        consumer = i >= LAYERS - CONSUMERS
        if consumer and shared is None:
            k, v = (norm(x, "shared_norm") @ w["shared_kv"].T).view(s, 2, DIM).split(1, 1)
            shared = rotate(k), v
        q, k, v = (norm(x, n + "input_norm") @ w[n + "qkv"].T).view(s, HEADS + 2, DIM).split((HEADS, 1, 1), 1)
        mask = near & ((at >= cut) | (at[:, None] == at)) if consumer else near
        x = x + attend(rotate(q), rotate(k), v, mask) @ w[n + "output"].T
        if consumer:
            q = rotate((norm(x, n + "cross_norm") @ w[n + "cross_q"].T).view(s, HEADS, DIM))
            x = x + attend(q, *shared, causal) @ w[n + "cross_output"].T
        gate, up = (norm(x, n + "post_norm") @ w[n + "gate_up"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w[n + "down"].T
    return norm(x, "norm") @ w.get("head", w["embed"]).T


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def test_the_arithmetic_is_that_of_plain_torch() -> None:
    target, ids = make_yoco(), ids_of(31)
    hidden, _, _ = target.forward_sequences([ids])
    torch.testing.assert_close(target.logits(hidden).double(), plain(target, ids), rtol=0, atol=1e-4)


def requests(**params: object) -> list[Request]:
    settings: dict = {"temperature": 0.9, "max_tokens": 25} | params
    return [Request(tuple(ids_of(n, n).tolist()), SamplingParams(**settings, seq_seed=n)) for n in (3, 60, 22, 41, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("back", [None, 500])
def test_the_contract_holds(dtype: torch.dtype, back: int | None) -> None:
    """With rings (the default) and without: drafts, chunks, widths and company do not show; nor in the trainer's
    pass."""
    target = make_yoco(dtype)
    drafter = make_drafter(target, target_layer_ids=(0, 1))
    reference = Engine(target).generate(requests())
    for options in ({}, {"max_batch": 2, "prefill_chunk": 7}, {"verify_tokens": 2}):
        got = Engine(target, drafter, EngineOptions(backtracking=back, **options)).generate(requests())
        assert min(counts(got)) > 0
        assert outputs(got) == outputs(reference)
    scorer = Engine(target)
    for request, done in zip(requests(), reference, strict=True):
        logprobs, raw = scorer.score(request.prompt_ids, done.token_ids, request.params)
        assert torch.equal(logprobs, torch.tensor(done.logprobs))
        assert torch.equal(raw, torch.tensor(done.raw_logprobs))


KEEP = WINDOW + 6
EXACT = CONSUMERS * (WINDOW - 1) + 1  # from here on nothing that a last token sees is cut


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody wrote is NaN: whoever looks at it is found out."""

    class Poisoned(KVCache):
        def __init__(self, *args: object, **kwargs: object):
            super().__init__(*args, **kwargs)  # type: ignore[arg-type]
            for tensor in (*self.k, *self.v):
                tensor.fill_(torch.nan)

    monkeypatch.setattr("dspark.runner.engine.KVCache", Poisoned)


def cut(target: Target, mode: str, keep: int, some: list[Request] | None = None, **options: object) -> list:
    drafter = make_drafter(target, target_layer_ids=(0, 1))
    engine = Engine(target, drafter, EngineOptions(truncation=mode, keep_tokens=keep, **options))
    return engine.generate(some or requests())


def test_a_cut_is_a_function_of_the_request_alone() -> None:
    """Chunk size, company, order, draft model and mode do not show in it; that it was cut does."""
    assert KEEP < EXACT, "inconclusive: this keep cuts nothing away"
    target = make_yoco()
    wanted = outputs(cut(target, "compact", KEEP))
    assert wanted != outputs(cut(target, "off", 0)), "inconclusive: nothing was cut"
    for chunk in (
        *range(1, 8),
        10,
        11,
        13,
        25,
        26,
        *range(46, 54),
        59,
        60,
    ):  # cuts and prompts end in all sorts of places
        for mode in ("compact", "mask"):
            assert outputs(cut(target, mode, KEEP, prefill_chunk=chunk)) == wanted, (chunk, mode)
    for chunk in (7, 49, 256):
        assert outputs(cut(target, "compact", KEEP, prefill_chunk=chunk, max_batch=1)) == wanted
        assert outputs(cut(target, "compact", KEEP, requests()[::-1], prefill_chunk=chunk))[::-1] == wanted
    plain = Engine(target, None, EngineOptions(truncation="compact", keep_tokens=KEEP)).generate(requests())
    assert outputs(plain) == wanted


def test_a_suffix_longer_than_the_consumers_look_back_is_exact() -> None:
    """By arithmetic in fp64, and by the runner's bits: EXACT cuts, and changes nothing; one less may."""
    target, ids = make_yoco(), ids_of(60, 60)
    full = plain(target, ids)[-1]
    assert torch.equal(plain(target, ids, cut=60 - EXACT)[-1], full)
    assert (plain(target, ids, cut=60 - KEEP)[-1] - full).abs().max() > 1e-6
    whole = outputs(cut(target, "off", 0))
    for keep in (EXACT, EXACT + 9, 40, 60):
        assert outputs(cut(target, "compact", keep, prefill_chunk=7)) == whole


def test_what_is_cut_is_what_plain_torch_cuts() -> None:
    """The first token's law of a prompt of 60 whose consumers see the last 11 tokens alone."""
    target, ids = make_yoco(), ids_of(60, 60)
    logits = plain(target, ids, cut=60 - KEEP)[-1].log_softmax(-1)
    full = plain(target, ids)[-1].log_softmax(-1)
    (done,) = (c for r, c in zip(requests(), cut(target, "compact", KEEP), strict=True) if len(r.prompt_ids) == 60)
    token, first = done.token_ids[0], done.raw_logprobs[0]
    assert abs(float(logits[token] - full[token])) > 1e-4, "inconclusive: the cut does not show in this token"
    assert first == pytest.approx(float(logits[token]), abs=2e-5)


@pytest.mark.parametrize("mode", ["off", "compact", "mask"])
def test_reused_prefixes_do_not_show(mode: str) -> None:
    """Equal prompts share their suffix's consumer rows; kin, whose suffix begins elsewhere, share nothing."""
    target, start = make_yoco(), tuple(ids_of(40).tolist())
    some = [Request((*start, *range(1, 1 + n)), SamplingParams(max_tokens=9, seq_seed=i))
            for i, n in enumerate((1, 1, 4, 4, 9, 9))]  # fmt: skip
    done = {}
    for reuse in (False, True):
        options = EngineOptions(truncation=mode, keep_tokens=KEEP * (mode != "off"), reuse_prefixes=reuse)
        engine = Engine(target, make_drafter(target, target_layer_ids=(0, 1)), options)
        done[reuse] = outputs(engine.generate(some))
        assert (engine.prefixes.hits >= 3) == reuse
    assert done[True] == done[False]


def test_mistakes_are_said() -> None:
    yoco, target = make_yoco(), make_target(torch.float32)
    with pytest.raises(DsparkError, match=f"keep >= {KEEP}"):
        Engine(yoco, None, EngineOptions(truncation="compact", keep_tokens=KEEP - 1))
    with pytest.raises(DsparkError, match="decoder-decoder target"):
        Engine(target, None, EngineOptions(truncation="mask", keep_tokens=100))
    with pytest.raises(DsparkError, match=r"reads layers below 2, but it reads \[2\]"):
        Engine(yoco, make_drafter(yoco), EngineOptions(truncation="compact", keep_tokens=100))
    for change in ({"num_consumer_layers": LAYERS}, {"num_consumer_layers": None}, {"sliding_window": 0}):
        with pytest.raises(DsparkError, match="expected"):
            read_config({**CONFIG, **change})


def test_switches_of_replay_that_contradict_each_other_are_said() -> None:
    for options in ({"truncation": "compact"}, {"keep_tokens": 40}, {"truncation": "bogus", "keep_tokens": 40}):
        with pytest.raises(DsparkError, match="compact or mask with keep_tokens > 0"):
            EngineOptions(**options)
