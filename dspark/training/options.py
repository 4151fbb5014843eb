"""The settings of a training recipe: plain dataclasses, so that every field is a typed, documented override.

`as_options` turns what a checkpoint holds (plain dictionaries) back into them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from dspark.calibration.bootstrap import LEAST, MOST
from dspark.contracts import DsparkError
from dspark.scorecard.setting import Setting
from dspark.training.labels import LABELS, AnalyticLabel
from dspark.training.ranges import COUNT, DECAY, NATURAL, NOT_NEGATIVE, POSITIVE, SHARE, check, one_of

T = TypeVar("T")


@dataclass(kw_only=True)
class DrafterOptions:
    """Shape of the draft model.

    Args:
        mask_token_id: id fed in the unknown slots; a row of the target's vocabulary that no text uses, no stop id.
        target_layer_ids: target layers whose outputs are the context features, ascending; -1 is the embedding output.
        architecture: dspark: all slots of a block at once; mtp: one layer per predicted token, in sequence. mtp wants
            num_layers as large as block_size and no input_fusion, and needs no Markov head (markov_rank 0).
        block_size: width of a block.
        sample_from_anchor: true: slot 0 (the anchor) predicts too, and a block proposes block_size tokens.
        num_layers: draft layers.
        draft_vocab_size: the draft predicts only this many most frequent response ids; 0 keeps the full vocabulary.
        markov_rank: rank of the sequential head; 0 is plain DFlash.
        markov_head: vanilla, gated, rnn or pair.
        confidence_head: predict each slot's acceptance.
        confidence_with_markov: the confidence head also reads the previous token's Markov embedding.
        stop_gradient: keep the confidence loss out of the draft layers (disputed; the reference does not).
        sliding_window: context tokens a block may see; 0 is all.
        qk_norm: per-head norm of queries and keys, as Qwen3 layers have; null: as the target. Other engines' formats
            need true; copied layers without such norms then start with norms of weight 1.
        input_fusion: block inputs are projections of the last context feature and the anchor, not mask embeddings.
        layer_fusion: each draft layer mixes the tapped target layers with a map of its own, not one shared by all.
        convolution: two-tap convolutions along the block around each sublayer; needs a hidden size that 16 divides.
        candidates: drafting draws from this many tokens of the largest base logits per slot; 0 is all.
    """

    mask_token_id: int
    target_layer_ids: list[int]
    architecture: Literal["dspark", "mtp"] = "dspark"
    block_size: int = 5
    sample_from_anchor: bool = True
    num_layers: int = 2
    draft_vocab_size: int = 0
    markov_rank: int = 64
    markov_head: Literal["vanilla", "gated", "rnn", "pair"] = "vanilla"
    confidence_head: bool = True
    confidence_with_markov: bool = True
    stop_gradient: bool = False
    sliding_window: int = 0
    qk_norm: bool | None = None
    input_fusion: bool = False
    layer_fusion: bool = False
    convolution: bool = False
    candidates: int = 0


@dataclass(kw_only=True)
class LossOptions:
    """Weights of the losses and the law they are taken at.

    Args:
        ce: weight of the cross entropy against the response tokens.
        soft_ce: weight of the cross entropy against the target's whole law: learns faster than L1 from a far start.
        l1: weight of the L1 distance between the draft's and the target's law: twice what the rejection verifier
            refuses.
        coupled: weight of 1 - the coupled verifier's acceptance, for drafts it will verify, instead of l1; it sorts the
            vocabulary per slot (`dspark bench step --losses l1=0 coupled=0.9` says what that costs).
        confidence: weight of the confidence head's binary cross entropy.
        weighting: decay, or survival: slot k weighs the probability that all before it are accepted (by `label`'s
            verifier, as the draft is now; the idea of D-PACE), which costs one more pass over the draft's logits.
        decay: with weighting decay, slot k weighs exp(-k / decay); 0 weighs all alike.
        survival_floor: with weighting survival, the least weight of a slot. An untrained draft accepts next to nothing
            and would teach its first slot only; 0.1 is under half of what decay 4 gives the last of 7 slots, so it
            hardly shows once the draft is good.
        temperature: of the target's and the draft's law in the soft_ce and L1 terms, the confidence label and the
            validation.
        label: the acceptance label of the confidence head, by the verifier that will be used.
    """

    ce: float = 0.1
    soft_ce: float = 0.0
    l1: float = 0.9
    coupled: float = 0.0
    confidence: float = 1.0
    weighting: Literal["decay", "survival"] = "decay"
    decay: float = 4.0
    survival_floor: float = 0.1
    temperature: float = 1.0
    label: AnalyticLabel = "rejection"

    def __post_init__(self) -> None:
        weights = dict.fromkeys(("ce", "soft_ce", "l1", "coupled", "confidence", "decay"), NOT_NEGATIVE)
        kinds = {"weighting": one_of(("decay", "survival")), "label": one_of(LABELS[1:])}
        check("losses", self, **weights, survival_floor=SHARE, temperature=POSITIVE, **kinds)


@dataclass(kw_only=True)
class OptimizerOptions:
    """AdamW with linear warm-up and a cosine.

    Args:
        lr: peak learning rate.
        warmup_steps: steps of linear warm-up; step s has (s + 1) / warmup_steps of the peak.
        total_steps: where the cosine ends; 0 takes trainer.max_steps (which then must be set).
        min_lr_ratio: learning rate at the end, as a share of the peak.
        fresh_lr_ratio: rate of the draft layers and the confidence head as a share of lr. After init.regression they
            are the only parts that start from nothing: large steps suit them, small ones the parts solved for.
        weight_decay: on matrices only; norms, biases and scalars have none.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
    """

    lr: float = 1e-3
    warmup_steps: int = 20
    total_steps: int = 0
    min_lr_ratio: float = 0.05
    fresh_lr_ratio: float = 1.0
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        rates = {"lr": POSITIVE, "fresh_lr_ratio": POSITIVE, "min_lr_ratio": SHARE, "weight_decay": NOT_NEGATIVE}
        check("optimizer", self, **rates, warmup_steps=COUNT, total_steps=COUNT, beta1=DECAY, beta2=DECAY)


@dataclass(kw_only=True)
class InitOptions:
    """Where the draft model starts (DESIGN section 12).

    Args:
        from_target: start from the target's own layers and flat logits; false: plain random initialisation.
        layers: target layers to copy, one per draft layer; null takes the last ones.
        final_norm: the target's final norm times this is the draft's; small values start with flat base logits.
        residual_scale: out-projections times this; 0 makes every draft layer the identity at first; null leaves them.
        bigrams: start the Markov head from the bigram statistics of the training responses.
        regression: solve for the linear parts by least squares over this many training sequences (0: do not). Needs
            input_fusion or architecture mtp; replaces bigrams, final_norm and residual_scale.
        ridge: weight of the squared norms in that regression.
    """

    from_target: bool = True
    layers: list[int] | None = None
    final_norm: float | None = 0.1
    residual_scale: float | None = None
    bigrams: bool = True
    regression: int = 0
    ridge: float = 100.0

    def __post_init__(self) -> None:
        norms = {"final_norm": NOT_NEGATIVE, "residual_scale": NOT_NEGATIVE}
        check("init", self, **norms, regression=COUNT, ridge=POSITIVE)


def _settings() -> list[Setting]:
    """What the field quotes: the usual sampling, greedy, temperature 1; and what coupling costs against rejection."""
    usual, hot = (0.2, 0.9), (1.0, 1.0)
    return [
        Setting("coupled", *usual),
        Setting("greedy", 0.0),
        Setting("coupled", *hot),
        Setting("rejection", *usual),
        Setting("rejection", *hot),
    ]


@dataclass(kw_only=True)
class RolloutOptions:
    """The speculative rollouts of `lightning test`.

    Args:
        prompts: prompts to answer (JSONL, Parquet, a folder or a `datasets` name); "" for none: the test then is the
            analytic estimate on the sequences of data.init_args.test.
        split: one split of that source; "" takes all rows.
        limit: the first so many prompts; 0 takes all.
        max_tokens: most response tokens.
        settings: how to sample; each verifier, temperature and top-p is measured on its own.
        run_seed: with the prompt's id, the only source of randomness.
        batch_size: sequences in flight; changes no figure.
        out: folder of the report; "" takes trainer.default_root_dir.
    """

    prompts: str = ""
    split: str = ""
    limit: int = 0
    max_tokens: int = 72
    settings: list[Setting] = field(default_factory=_settings)
    run_seed: int = 0
    batch_size: int = 32
    out: str = ""

    def __post_init__(self) -> None:
        check("test", self, limit=COUNT, max_tokens=NATURAL, batch_size=NATURAL)
        self.settings = [as_options(Setting, s) for s in self.settings]
        if not self.settings or len(set(self.settings)) < len(self.settings):
            raise DsparkError(f"test: expected settings, each of them once, but got {self.settings}.")


@dataclass(kw_only=True)
class ReportOptions:
    """The calibration and its report of `lightning test recipes/confidence.yaml`.

    Args:
        method: what is fitted to each slot on data.init_args.predict: temperature, platt or isotonic; the others are
            fitted too, and reported beside it.
        against: an older report.json (or its folder): has calibration moved since?
        replicates: bootstrap replicates behind every interval.
        out: folder of calibration.json and the report; "" takes trainer.default_root_dir/report.
    """

    method: Literal["temperature", "platt", "isotonic"] = "temperature"
    against: str = ""
    replicates: int = 500
    out: str = ""

    def __post_init__(self) -> None:
        if not LEAST <= self.replicates <= MOST:
            raise DsparkError(f"report: expected replicates from {LEAST} to {MOST}, but got {self.replicates}.")


@dataclass(kw_only=True)
class FeatureOptions:
    """Where what the target says about a training sequence comes from.

    Args:
        cache: a folder that keeps it, per target, dtype and taps: asked once, read in later epochs and runs; the size
            is told first. null: the target runs in every step and nothing is stored.
    """

    cache: str | None = None


def as_options(kind: type[T], value: T | dict[str, Any]) -> T:
    """`value` as a `kind`. Raises DsparkError on an unknown key."""
    if not isinstance(value, dict):
        return value
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(value) - known)
    if unknown:
        raise DsparkError(f"{kind.__name__}: expected keys of {sorted(known)}, but got {unknown}.")
    return kind(**value)


def plain(**values: Any) -> dict[str, Any]:
    """Hyperparameters as plain types, which a checkpoint may hold and torch.load(weights_only=True) accepts."""
    return {k: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for k, v in values.items()}
