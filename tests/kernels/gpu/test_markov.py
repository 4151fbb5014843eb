"""The fused Markov step: logits to fp64, the index to the bits of its own logits, rows that ignore each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark import noise
from dspark_kernels.gpu import markov

VOCABULARY = 40


def inputs(n: int, v: int, rank: int, kind: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "base_logits": 2 * torch.randn(n, v),
        "w1": torch.randn(VOCABULARY, rank).to(kind),
        "w2": (torch.randn(v, rank) / rank**0.5).to(kind),
        "previous": torch.randint(VOCABULARY, (n,)),
        "temperature": torch.tensor([0.0, 1.0, 0.7, 1.3])[torch.arange(n) % 4],
        "seeds": torch.randint(2**62, (n,)),
        "stream": noise.DRAFT,
        "positions": torch.randint(1000, (n,)),
    }


def take(given: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The arguments of some rows."""
    by_row = ("base_logits", "previous", "temperature", "seeds", "positions")
    return given | {name: given[name][rows].contiguous() for name in by_row}


def choice(logits: Tensor, given: dict[str, Any], ids: Tensor) -> Tensor:
    """The index that these fp32 logits and the keyed noise give, in eager torch."""
    heat = given["temperature"][:, None]
    drawn = logits / torch.where(heat == 0, 1.0, heat)
    drawn = drawn + noise.gumbel(given["seeds"], given["stream"], given["positions"], ids)
    return torch.where(heat == 0, logits, drawn).argmax(-1)


@pytest.mark.parametrize(
    ("n", "v", "rank", "kind"),
    [
        (5, 300, 24, torch.float32), (17, 128, 16, torch.bfloat16), (1, 129, 1, torch.float32),
        (3, 7, 65, torch.bfloat16), (4, 200, 512, torch.bfloat16), (2, 1, 300, torch.float32),
    ],
)  # fmt: skip
def test_against_fp64(n: int, v: int, rank: int, kind: torch.dtype) -> None:
    """Products of at most 512 terms of size 1 / sqrt(rank): an fp32 sum is within 1e-5 of the truth."""
    given = inputs(n, v, rank, kind)
    index, logits = markov.sample(**given, store_logits=True)
    expected, truth = markov.sample_reference(**given, store_logits=True)
    assert logits is not None
    torch.testing.assert_close(logits, truth, rtol=1e-5, atol=1e-5)
    assert torch.equal(index, choice(logits, given, torch.arange(v)))
    assert torch.equal(index, expected), "no two scores of this case lie within 1e-5"
    alone, none = markov.sample(**given)
    assert none is None
    assert torch.equal(alone, index)


def test_noise_belongs_to_token_ids() -> None:
    """A reduced vocabulary: columns are other ids, and draw those ids' noise."""
    given, ids = inputs(9, 150, 8), torch.arange(150) * 3 + 1
    index, logits = markov.sample(**given, token_ids=ids, store_logits=True)
    assert logits is not None
    assert torch.equal(index, choice(logits, given, ids))
    assert torch.equal(index, markov.sample_reference(**given, token_ids=ids)[0])
    assert not torch.equal(index, markov.sample(**given)[0])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_row_ignores_the_others(kind: torch.dtype) -> None:
    """Weights are small integers, so that products are exact: the interpreter's tl.dot is a BLAS call whose last bits
    change with a row's place in the tile. The order of the sum on a GPU is not under test here."""
    given = inputs(32, 200, 20, kind)
    given["w1"], given["w2"] = (torch.randint(-4, 5, w.shape).to(kind) for w in (given["w1"], given["w2"]))
    index, logits = markov.sample(**given, store_logits=True)
    assert logits is not None
    batches = [torch.tensor([n]) for n in (0, 7, 31)] + [torch.arange(32)[-n:] for n in (2, 7, 8, 9)]
    for rows in [*batches, torch.randperm(32)]:
        some, some_logits = markov.sample(**take(given, rows), store_logits=True)
        assert some_logits is not None
        assert torch.equal(some, index[rows])
        assert torch.equal(some_logits, logits[rows])


def test_equal_scores_go_to_the_lower_column() -> None:
    given = inputs(2, 300, 4) | {"temperature": torch.zeros(2)}
    given["base_logits"].fill_(1.0)
    given["w2"].zero_()
    given["base_logits"][1, [40, 170, 299]] = 2.0
    assert markov.sample(**given)[0].tolist() == [0, 40]
    given["base_logits"][1, 40] = 1.0
    assert markov.sample(**given)[0].tolist() == [0, 170]


def test_minus_infinity_is_never_drawn() -> None:
    given = inputs(64, 6, 4)
    given["base_logits"][:, [0, 2, 5]] = -torch.inf
    index = markov.sample(**given)[0]
    assert set(index.tolist()) == {1, 3, 4}
    assert torch.equal(index, markov.sample_reference(**given)[0])


def test_what_cannot_be_sampled_gives_minus_one() -> None:
    given = inputs(8, 130, 4)
    given["base_logits"][0] = given["base_logits"][1] = -torch.inf
    given["base_logits"][2, 5] = given["base_logits"][3, 129] = torch.inf
    given["base_logits"][4, 7] = given["base_logits"][5, 128] = torch.nan
    given["previous"][6] = VOCABULARY
    given["previous"][7] = -1
    index, logits = markov.sample(**given, store_logits=True)
    assert index.tolist() == [-1] * 8
    assert logits is not None
    assert logits[6:].isnan().all()


def test_no_rows_and_wrong_arguments() -> None:
    given = inputs(2, 5, 4)
    empty = markov.sample(**take(given, torch.arange(0)), store_logits=True)
    assert empty[0].shape == (0,)
    assert empty[1] is not None
    assert empty[1].shape == (0, 5)
    with pytest.raises(ValueError, match=r"w2 \[5, 4\] of bfloat16"):
        markov.sample(**given | {"w1": given["w1"].bfloat16()})
    with pytest.raises(ValueError, match="rank of 1 to 512"):
        markov.sample(**given | {"w1": torch.zeros(40, 600), "w2": torch.zeros(5, 600)})
