"""Trains a policy on its own rollouts: `lightning fit recipes/rl.yaml`.

One training step: the runner, which shares the policy's weights, answers a few prompts several times (a rollout); a
function of the user's rewards the answers; the policy is updated on them; the draft model follows. The
log-probabilities that the updates start from are the sampler's, bit for bit, and the run stops where one is not: so the
first update after a rollout needs no correction, its ratio is exactly 1.

global_step counts the policy's updates. A checkpoint lies between two rollouts, so a resumed run goes on with the very
prompts, seeds and weights it would have had; rollouts that a killed run had finished are found on disk.
Left out on purpose: rollouts beside the updates (asynchronous, off-policy), sharded policies (the runner needs its
weights whole), value functions.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from dspark.contracts import DsparkError, Request
from dspark.noise import derive_seed
from dspark.rl.follow import Follower
from dspark.rl.history import HISTORY, History, rollout_figures, rollouts_told
from dspark.rl.masters import Masters
from dspark.rl.options import FollowOptions, ObjectiveOptions, PolicyOptimizerOptions
from dspark.rl.ranks import Ranks
from dspark.rl.rollout import Rollout, folder, roll
from dspark.rl.run_record import keep_run_record, refuse_other_run
from dspark.rl.save import save_drafter, save_policy
from dspark.rl.start import Start
from dspark.rl.update import Updates
from dspark.rollouts.collect import in_order, request_for
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.store import read_trajectories
from dspark.runner.lookup import Lookup
from dspark.training.batches import BatchPlan, TrainStream
from dspark.training.optim import make_optimizer
from dspark.training.options import as_options, plain
from dspark.training.ranges import COUNT, NATURAL, NOT_NEGATIVE, SHARE, check

T = TypeVar("T")
MASTERS_KEY, FOLLOW_KEY, HISTORY_KEY, RECORD_KEY = "dspark_masters", "dspark_follow", "dspark_history", "dspark_record"
# Settings that may be others when a run is resumed: paths (hashes count) and what shows in no result.
FREE = ("batch_size", "target", "drafter", "prompts", "curve", "out", "keep_policies", "max_failed_share")


class PolicyModule(LightningModule):
    """A policy in training.

    Args:
        rollout: what `dspark rollout` takes: the target that the policy starts from, the draft model, the prompts, how
            answers are sampled and rewarded. out holds a folder a rollout; run_seed is the run's one seed.
        prompts_per_rollout: prompts a rollout answers, rollout.samples_per_prompt times each.
        objective: what an update minimises.
        optimizer: AdamW of the policy.
        follow: how the draft model follows.
        random_weights: the policy starts from random weights of this standard deviation, drawn from run_seed, in the
            shape that the target's config.json says; 0 takes the target's weights.
        token_budget: tokens of a forward and backward pass; an update adds up as many as it needs. Changes no
            log-probability.
        max_failed_share: share of a rollout's samples without a reward past which the run stops.
        keep_policies: before every so many rollouts the policy is kept as a checkpoint folder, policies/NUMBER in
            trainer.default_root_dir: that rollout replays with it. 0 keeps none.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        prompts_per_rollout: int = 8,
        objective: ObjectiveOptions | None = None,
        optimizer: PolicyOptimizerOptions | None = None,
        follow: FollowOptions | None = None,
        random_weights: float = 0.0,
        token_budget: int = 2048,
        max_failed_share: float = 0.1,
        keep_policies: int = 0,
    ):
        super().__init__()
        self.automatic_optimization = False
        self.rollout = as_options(RolloutConfig, rollout)
        self.objective = as_options(ObjectiveOptions, objective or ObjectiveOptions())
        self.optimizer_options = as_options(PolicyOptimizerOptions, optimizer or PolicyOptimizerOptions())
        self.follow = as_options(FollowOptions, follow or FollowOptions())
        self.prompts_per_rollout, self.random_weights = prompts_per_rollout, random_weights
        self.token_budget, self.max_failed_share, self.keep_policies = token_budget, max_failed_share, keep_policies
        given = {"rollout": self.rollout.as_dict(), "objective": self.objective, "optimizer": self.optimizer_options}
        given |= {"prompts_per_rollout": prompts_per_rollout, "follow": self.follow, "random_weights": random_weights}
        self.save_hyperparameters(plain(**given, token_budget=token_budget, max_failed_share=max_failed_share,
                                        keep_policies=keep_policies))  # fmt: skip
        self._refuse_contradictions()
        self.history = History()
        self._parts: list[Start] = []  # in a list, so that nothing of it is a submodule
        self._resumed: dict[str, Any] = {}  # of a checkpoint, for what is made after it was read

    def _refuse_contradictions(self) -> None:
        """Raises DsparkError for settings that do not go together."""
        whole = {"prompts_per_rollout": NATURAL, "token_budget": NATURAL, "keep_policies": COUNT}
        check("model", self, **whole, random_weights=NOT_NEGATIVE, max_failed_share=SHARE)
        config, samples = self.rollout, self.rollout.samples_per_prompt * self.prompts_per_rollout
        checks = (
            ("rollout.reward", bool(config.reward), "module:function or file.py:function", config.reward),
            ("rollout.samples_per_prompt", config.samples_per_prompt > 1, "> 1, a group", config.samples_per_prompt),
            ("rollout.temperature", config.temperature > 0, "> 0, to explore", config.temperature),
            ("rollout.verifier", config.verifier == "coupled", "coupled: under rejection a trajectory depends on the "
             "draft model, whose policy moves", config.verifier),
            ("rollout.truncation", config.truncation in ("", "off"), "off: updates read all", config.truncation),
            ("rollout.engine", config.engine == "dspark", "dspark: it shares the policy's weights", config.engine),
            ("rollout.workers", config.workers == 1, "1 (more processes: trainer.strategy ddp)", config.workers),
            ("follow.steps", not self.follow.steps or bool(config.drafter), "0 without a drafter", self.follow.steps),
            ("objective.updates_per_rollout", self.objective.updates_per_rollout <= samples,
             f"at most {samples}, the samples of a rollout", self.objective.updates_per_rollout),
        )  # fmt: skip
        for name, ok, wanted, got in checks:
            if not ok:
                raise DsparkError(f"model.init_args.{name}: expected {wanted}, but got {got!r}.")

    # ---- construction -------------------------------------------------------------------------------------------

    def refuse_verb(self, verb: str) -> None:
        """Raises DsparkError for another verb than fit; the command line asks before Lightning does."""
        if verb != "fit":
            raise DsparkError(
                f"{verb}: expected `fit`, the one verb of an RL recipe, but got {verb}. To judge a policy, roll it "
                "out: dspark rollout recipes/rollout.yaml --target runs/rl/policy --reward ..."
            )

    def setup(self, stage: str) -> None:
        """Load policy, tokenizer, draft model and prompts, once."""
        self.refuse_verb(stage)
        _refuse_trainer(self.trainer, self.objective.updates_per_rollout)
        if not self._parts:
            self._parts.append(Start.load(self.rollout, self.random_weights, self.objective.kl > 0))
            _refuse_to_follow(self.follow, self.start.config)
            self.policy = self.start.policy
            self.masters = Masters(self.policy.named_parameters())

    @property
    def start(self) -> Start:
        return self._parts[0]

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.trainer.world_size, self.trainer.strategy)

    def train_dataloader(self) -> TrainStream:
        """Places in the list of prompts, a rollout's worth at a time; shuffled anew in every epoch, by run_seed."""
        plan = BatchPlan(
            [1] * len(self.start.prompts), self.prompts_per_rollout, self.rollout.run_seed, True,
            self.trainer.global_rank, self.trainer.world_size,
        )  # fmt: skip
        return TrainStream(plan, lambda epoch, places: places)

    def configure_optimizers(self) -> Any:
        optimizer, schedule = make_optimizer(self.masters.named(), self.optimizer_options.adamw, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Makes what a checkpoint fills only now, and refuses to go on among another run's rollouts."""
        rollouts = -(-self.trainer.max_steps // self.objective.updates_per_rollout)
        bundle, total = self.start.bundle, self.follow.optimizer.total_steps or rollouts * self.follow.steps
        self.follower = Follower(bundle.drafter, self.policy.target, self.follow, total, self.ranks) if bundle else None
        if self._resumed:
            self.masters.load_state_dict(self._resumed[MASTERS_KEY])
            self.history = History(self._resumed[HISTORY_KEY])
            if self.follower:
                self.follower.load_state_dict(self._resumed[FOLLOW_KEY])
        if self.trainer.is_global_zero:
            self._refuse_shorter_run(rollouts)
            keep_run_record(self.rollout.out, self._record(), len(self.history.lines) * self.trainer.world_size)
        self.lookup = Lookup(self.rollout.lookup) if self.rollout.lookup else None
        self._recall()
        gc.freeze()  # or the lookup's many objects make each full collection look through all that was imported

    def _refuse_shorter_run(self, rollouts: int) -> None:
        """Raises DsparkError where a run from the start would end before the one that is there, and replace it."""
        root = Path(self.trainer.default_root_dir)
        there = 0 if self._resumed else rollouts_told(root)
        if there > rollouts:
            raise DsparkError(
                f"{root}: expected a folder without a longer run, but got the history of {there} rollouts, and "
                f"max_steps is enough for {rollouts}: its policy would be replaced. Go on from its last.ckpt "
                "(--ckpt_path), or give another trainer.default_root_dir."
            )

    def _record(self) -> dict[str, Any]:
        """What decides on the run's results, and which builds and threads make them."""
        given = {name: value for name, value in self.hparams.items() if name not in FREE and not name.startswith("_")}
        given["rollout"] = {name: value for name, value in given["rollout"].items() if name not in FREE}
        record = {"settings": given, "processes": self.trainer.world_size, **self.start.record()}
        return dict(json.loads(json.dumps(record)))  # plain types, as both files give them back

    def _recall(self) -> None:
        """A resumed run's lookup: what this process wrote in the last rollouts, as far as the window goes."""
        if self.lookup is None:
            return
        world, rank = self.trainer.world_size, self.trainer.global_rank
        size = self.rollout.samples_per_prompt * self.prompts_per_rollout
        for number in range(max(0, len(self.history.lines) - -(-self.lookup.window // size)), len(self.history.lines)):
            place = folder(self.rollout.out, number * world + rank)
            for t in read_trajectories(place) if place.exists() else ():
                self.lookup.remember(t.prompt_ids, t.response_ids)

    # ---- one step -----------------------------------------------------------------------------------------------

    def training_step(self, places: list[int], batch_idx: int) -> None:
        """Roll out, update, follow."""
        number = self.trainer.global_step // self.objective.updates_per_rollout
        self._keep_policy(number)
        rollout, rolled = _timed(lambda: self.ranks.together(lambda: self._roll(places, number)))
        learned, updated = _timed(lambda: self._updates().learn(rollout))
        followed, trained = _timed(lambda: self._follow(rollout))
        seconds = {"rollout": rolled, "generate": rollout.seconds, "update": updated, "follow": trained}
        self._tell(number, rollout, learned, followed, seconds)

    def _keep_policy(self, number: int) -> None:
        if self.keep_policies and number % self.keep_policies == 0 and self.trainer.is_global_zero:
            kept = folder(Path(self.trainer.default_root_dir) / "policies", number * self.trainer.world_size)
            save_policy(kept, self.policy.target, self.rollout.target)

    def _roll(self, places: list[int], number: int) -> Rollout:
        """The rollout of that number; without a draft model in its manifest's settings, for it replays without."""
        drafter = self.follower.serve() if self.follower else None
        config = self._rollout_config(number)
        prompts, facts = [self.start.prompts[i] for i in places], self.start.facts(drafter)
        rollout = roll(
            prompts, self.start.engine(drafter, self.lookup), config, facts, self.policy.target.eos_ids,
            self.start.tokenizer, self.start.reward, self.max_failed_share,
        )  # fmt: skip
        if self.lookup and not rollout.seconds:  # it was there already
            for t in rollout.trajectories:
                self.lookup.remember(t.prompt_ids, t.response_ids)
        return rollout

    def _rollout_config(self, number: int) -> RolloutConfig:
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return replace(
            self.start.config, run_seed=derive_seed(self.rollout.run_seed, "rollout", number), skip=0, limit=0,
            drafter="", out=str(folder(self.rollout.out, number * world + rank)),
        )  # fmt: skip

    def requests(self, places: list[int], number: int) -> list[Request]:
        """What the runner is asked in the rollout of that number."""
        config, prompts = self._rollout_config(number), [self.start.prompts[i] for i in places]
        params = config.params(self.policy.target.eos_ids)
        return [request_for(item, params, config.run_seed) for item in in_order(prompts, config.samples_per_prompt)]

    def _updates(self) -> Updates:
        return Updates(
            self.policy, self.start.reference, self.masters, self.objective, self.rollout.max_tokens, self.token_budget,
            self.optimizer_options.max_norm, self.ranks, self.manual_backward, self._step,
        )  # fmt: skip

    def _step(self) -> None:
        self.optimizers().step()  # type: ignore[union-attr]  # one optimizer
        self.lr_schedulers().step()  # type: ignore[union-attr]

    def _follow(self, rollout: Rollout) -> dict[str, float]:
        return self.follower.learn(rollout.samples()) if self.follower and self.follow.steps else {}

    def _tell(
        self, number: int, rollout: Rollout, learned: dict[str, float], followed: dict[str, float],
        seconds: dict[str, float],
    ) -> None:  # fmt: skip
        """Figures over all ranks; the seconds are this one's."""
        shown = rollout_figures(rollout, bool(self.follower or self.lookup), self.ranks.add)
        lines = {"rollout": shown, "train": learned, "follow": followed, "seconds": seconds}
        flat = {f"{group}/{name}": value for group, values in lines.items() for name, value in values.items()}
        self.log_dict({k: v for k, v in flat.items() if v == v}, batch_size=1)
        self.log("reward", shown["reward"], prog_bar=True, logger=False, batch_size=1)
        if self.trainer.is_global_zero:
            line = {"rollout": number, "step": self.trainer.global_step, "policy": rollout.policy, **flat}
            self.history.add(line, self.trainer.default_root_dir)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[MASTERS_KEY], checkpoint[HISTORY_KEY] = self.masters.state_dict(), self.history.lines
        checkpoint[FOLLOW_KEY] = self.follower.state_dict() if self.follower else {}
        checkpoint[RECORD_KEY] = self._record()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises DsparkError when the run that wrote the checkpoint had other settings."""
        if RECORD_KEY not in checkpoint:
            raise DsparkError("checkpoint: expected one of an RL run, but it holds no policy's. Give its last.ckpt.")
        refuse_other_run("checkpoint", checkpoint[RECORD_KEY], self._record())
        self._resumed = {key: checkpoint[key] for key in (MASTERS_KEY, FOLLOW_KEY, HISTORY_KEY)}

    def on_fit_end(self) -> None:
        """Writes the policy as a checkpoint folder, and the draft model that followed it as a bundle."""
        if not self.trainer.is_global_zero:
            return
        root = Path(self.trainer.default_root_dir)
        save_policy(root / "policy", self.policy.target, self.rollout.target)
        told = [self.history.summary(), f"history: {root / HISTORY}", f"policy: {root / 'policy'}"]
        if self.follower and self.start.bundle:
            save_drafter(root / "drafter", self.follower.serve(), self.policy.target, self.start.bundle)
            told.append(f"draft model: {root / 'drafter'}")
        print("; ".join(told), file=sys.stderr)


def _refuse_to_follow(follow: FollowOptions, config: RolloutConfig) -> None:
    """Raises DsparkError where a round depends on more than its own sequence: whole blocks of some rounds alone say
    nothing of the others, and a run that was resumed would learn from other rounds."""
    if follow.steps and (config.policy != "fixed" or config.lookup):
        raise DsparkError(
            f"model.init_args.follow.steps: expected 0 unless every round is the draft model's and of fixed length, "
            f"but got {follow.steps} with policy {config.policy} and lookup {config.lookup}."
        )


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def _refuse_trainer(trainer: Trainer, updates: int) -> None:
    """Raises DsparkError for a trainer that would not do what the recipe says."""
    strategy = trainer.strategy
    savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    odd = [n for c in savers if (n := c._every_n_train_steps) and n % updates]
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise DsparkError(
            f"trainer.strategy: expected one process or ddp, but got {type(strategy).__name__}: the runner needs the "
            "policy's weights whole."
        )
    checks = (
        ("precision", trainer.precision == "32-true", "32-true (rollout.dtype is what the policy computes in)",
         trainer.precision),
        ("max_steps", trainer.max_steps > 0 and trainer.max_steps % updates == 0,
         f"a multiple of objective.updates_per_rollout ({updates})", trainer.max_steps),
        ("callbacks", not odd, f"checkpoints every so many steps that {updates} (updates_per_rollout) divides", odd),
        ("accelerator", strategy.root_device.type == "cpu", "cpu, where the operations are", strategy.root_device),
    )  # fmt: skip
    whole = {"fast_dev_run": ("0", "False"), "overfit_batches": ("0", "0.0"), "limit_train_batches": ("None", "1.0")}
    partial = [(name, got) for name, usual in whole.items() if repr(got := getattr(trainer, name)) not in usual]
    if partial:
        raise DsparkError(
            f"trainer.{partial[0][0]}: expected it left out, but got {partial[0][1]}: it would end a run early, or "
            "give it other prompts, and leave its files in the place of a whole one's. Lower max_steps."
        )
    for name, ok, wanted, got in checks:
        if not ok:
            raise DsparkError(f"trainer.{name}: expected {wanted}, but got {got}.")
