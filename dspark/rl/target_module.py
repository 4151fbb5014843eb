"""Trains a small target from nothing: `lightning fit recipes/yoco.yaml`. To show mechanisms on, not for its answers.

Next-token cross entropy over the answers' tokens, through the same operations the runner uses, so that what is saved
runs as it trained. At its end the run writes an ordinary checkpoint folder (config.json, model.safetensors, tokenizer),
which every command takes for --target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from dspark.contracts import DsparkError
from dspark.rl.policy import Policy
from dspark.rl.save import save_target
from dspark.target.checkpoint import read_config_dict
from dspark.target.decoder import Target
from dspark.target.families import read_config
from dspark.target.load import checkpoint_dir
from dspark.target.weights import starting_weights
from dspark.training.batches import SequenceBatch
from dspark.training.optim import make_optimizer
from dspark.training.options import OptimizerOptions, as_options, plain


@dataclass(kw_only=True)
class YocoOptions:
    """Shape of a decoder-decoder target.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the gated MLP.
        num_layers: layers in all.
        consumers: the last so many of them share one set of keys and values.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of one head.
        window: tokens a layer's own attention sees.
        max_position_embeddings: longest context.
    """

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 6
    consumers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    window: int = 32
    max_position_embeddings: int = 4096

    def config(self, like: dict[str, Any]) -> dict[str, Any]:
        """A config.json; the vocabulary and the special tokens are those of `like`."""
        special = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
        kept: dict[str, Any] = {name: like[name] for name in special if name in like}
        return {
            **kept, "architectures": ["YocoForCausalLM"], "model_type": "yoco", "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size, "num_hidden_layers": self.num_layers,
            "num_consumer_layers": self.consumers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "sliding_window": self.window,
            "max_position_embeddings": self.max_position_embeddings, "tie_word_embeddings": True,
            "torch_dtype": "float32",
        }  # fmt: skip


class TargetModule(LightningModule):
    """A decoder-decoder target in training.

    Args:
        tokenizer: whose tokenizer and vocabulary: a target source.
        shape: of the model.
        optimizer: AdamW and its schedule.
        seed: keys the initial weights.
        out: folder of the checkpoint; "" takes trainer.default_root_dir/target.
    """

    def __init__(
        self, tokenizer: str, shape: YocoOptions | None = None, optimizer: OptimizerOptions | None = None,
        seed: int = 0, out: str = "",
    ):  # fmt: skip
        super().__init__()
        self.tokenizer, self.seed, self.out = tokenizer, seed, out
        self.shape = as_options(YocoOptions, shape or YocoOptions())
        self.optimizer_options = as_options(OptimizerOptions, optimizer or OptimizerOptions())
        self.raw = self.shape.config(read_config_dict(checkpoint_dir(tokenizer)))
        config = read_config(self.raw)
        self.policy = Policy(Target(config, starting_weights(config, seed, torch.float32, scale=0.02)))
        self.save_hyperparameters(
            plain(tokenizer=tokenizer, shape=self.shape, optimizer=self.optimizer_options, seed=seed, out=out)
        )

    def configure_optimizers(self) -> Any:
        total = self.optimizer_options.total_steps or self.trainer.max_steps
        if total <= 0:
            raise DsparkError("trainer.max_steps: expected a number of steps for the schedule, but got none.")
        optimizer, schedule = make_optimizer(self.policy.named_parameters(), self.optimizer_options, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loss(self, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """(sum of -ln p of the supervised tokens, how many): nats."""
        target = self.policy.target
        target.refresh()
        hidden, _, offsets = target.forward_sequences(batch.sequences())
        last = torch.zeros(len(batch.ids), dtype=torch.bool)
        last[offsets[1:] - 1] = True
        rows = (batch.loss_mask.roll(-1) & ~last).nonzero().flatten()  # whose next token is supervised
        logits = target.logits(hidden[rows])
        wrong = torch.nn.functional.cross_entropy(logits, batch.ids[rows + 1], reduction="sum")
        return wrong, torch.tensor(float(len(rows)))

    def training_step(self, batch: SequenceBatch, batch_idx: int) -> Tensor:
        total, count = self.loss(batch)
        mean = total / count.clamp_min(1.0)
        self.log("train/nats", mean.detach(), prog_bar=True, batch_size=1)
        return mean

    def validation_step(self, batch: SequenceBatch, batch_idx: int) -> None:
        total, count = self.loss(batch)
        self.log("val/nats", total / count.clamp_min(1.0), prog_bar=True, batch_size=int(count))

    def on_fit_end(self) -> None:
        """Writes the checkpoint folder."""
        if not self.trainer.is_global_zero:
            return
        folder = Path(self.out or Path(self.trainer.default_root_dir) / "target")
        save_target(folder, self.policy.target, self.raw, checkpoint_dir(self.tokenizer))
        print(f"target: {folder}")
