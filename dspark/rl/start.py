"""What an RL run is made of besides its policy's weights: loaded once, by the settings of its rollouts."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch

from dspark import ops
from dspark.corpus.prompts import Prompt, load_prompts, prompts_hash
from dspark.drafter.identity import identity_hash, layers_hash, tensor_hashes
from dspark.drafter.model import Drafter
from dspark.export.bundle import Bundle, check_target, load_bundle
from dspark.export.switches import apply_temperature_switch, serving_options
from dspark.files import sha256_json
from dspark.rl.policy import Policy
from dspark.rollouts.collect import choose
from dspark.rollouts.config import RolloutConfig
from dspark.rollouts.facts import calibration_hash, tokenizer_hash
from dspark.rollouts.manifest import run_facts
from dspark.rollouts.rewards import Reward, load_reward
from dspark.rollouts.settle import longest_prompt, quarantine_path, settled
from dspark.runner import Engine, EngineOptions
from dspark.runner.curve import CapacityCurve
from dspark.runner.lookup import Lookup
from dspark.target.decoder import Target
from dspark.target.load import load_target, load_tokenizer, random_target


@dataclass(frozen=True, slots=True)
class Start:
    """policy: the weights the run starts from, its own copy. reference: another copy, None without a KL term. started:
    the fingerprint of both. prompts: distinct, in the file's order, skip and limit applied. bundle: the draft model,
    None without one. config: the rollouts' settings, settled."""

    policy: Policy
    reference: Policy | None
    started: str
    tokenizer: Any
    tokenizer_hash: str
    prompts: list[Prompt]
    bundle: Bundle | None
    curve: CapacityCurve | None
    reward: Reward
    config: RolloutConfig

    @staticmethod
    def load(config: RolloutConfig, random_weights: float, with_reference: bool) -> Start:
        """Raises DsparkError for a source that is not there, a draft model of another target, and prompts of which
        none is left."""
        target = _target(config, random_weights)
        assert target.self_tested
        bundle = load_bundle(config.drafter) if config.drafter else None
        if bundle:
            check_target(bundle, target)
            apply_temperature_switch(bundle)
        config, reward = settled(config, bundle), load_reward(config.reward)
        assert reward is not None, "a module without a reward is refused before"
        policy, tokenizer = Policy(target), load_tokenizer(config.target)
        return Start(
            policy, copy.deepcopy(policy).requires_grad_(False) if with_reference else None, target.fingerprint,
            tokenizer, tokenizer_hash(tokenizer), _prompts(config, tokenizer, target), bundle,
            CapacityCurve.load(config.curve) if config.curve else None, reward, config,
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        """What a run begins from, by hash."""
        return {
            "started": self.started,
            "prompts": prompts_hash(self.prompts),
            "drafter": self.bundle.hash if self.bundle else None,
            "tokenizer": self.tokenizer_hash,
            "reward": self.reward.code,
            "kernels": {k: v for k, v in ops.fingerprint().items() if k != "threads"},
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        }

    def engine(self, drafter: Drafter | None, lookup: Lookup | None) -> Engine:
        """A runner over the policy's weights as they are at any time. lookup: what it has written lately."""
        config = self.config
        options = serving_options(
            self.bundle, config.verifier, config.gamma, config.batch_size, policy=config.policy or "fixed",
            curve=self.curve, threshold=config.threshold, commit_to_cap=config.commit_to_cap,
            truncation=config.truncation,
        )  # fmt: skip
        return Engine(self.policy.target, drafter, options, lookup)

    def facts(self, drafter: Drafter | None) -> dict[str, Any]:
        """What the next rollout's manifest records: the weights of policy and draft model are hashed as they are."""
        hashes = tensor_hashes(drafter.state_dict()) if drafter else {}
        calibration = self.bundle.calibration if self.bundle else None
        facts = run_facts(
            target=self.policy.target.fingerprint,
            drafter=identity_hash(drafter.config, hashes) if drafter else None,
            draft_layers=layers_hash(drafter.config, hashes) if drafter else None,
            calibration=calibration_hash(drafter.confidence_head, calibration) if drafter else None,
            tokenizer=self.tokenizer_hash,
            verifier=self.config.verifier,
            dtype=self.config.dtype,
            device="cpu",
            kernels=ops.fingerprint(),
            threads=torch.get_num_threads(),
        )
        return {**facts, "curve": sha256_json(self.curve.to_dict()) if self.curve else None}


def _target(config: RolloutConfig, random_weights: float) -> Target:
    if random_weights:
        return random_target(config.target, config.dtype, config.run_seed, random_weights)
    return load_target(config.target, config.dtype)


def _prompts(config: RolloutConfig, tokenizer: Any, target: Target) -> list[Prompt]:
    longest = longest_prompt(config, target, EngineOptions().kv_tokens)
    aside = quarantine_path(config.out)
    found = load_prompts(config.prompts, tokenizer, config.split or None, aside, max_tokens=longest)
    if found.dropped:
        print(f"{len(found.dropped)} broken prompt rows were set aside: {aside} says why", file=sys.stderr)
    return choose(found.prompts, config.skip, config.limit)[0]
