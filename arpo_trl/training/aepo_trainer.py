"""`AEPOTrainer`: ARPO with entropy-balanced rollouts and updates."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import gather_object

from ..algorithms.clipping import TOKEN_OBJECTIVES, clip_counts, importance_ratio, ppo_clip, unclipped_above_entropy
from ..algorithms.entropy_advantage import (
    entropy_aware_advantage,
    entropy_statistics,
    sigmoid_entropy_advantage,
    standardized_entropy,
)
from ..algorithms.entropy_change import normalize_entropy
from ..algorithms.fork_rules import BranchingOptions, branch_penalty
from ..algorithms.kl import decayed_beta, scoped_kl
from ..extensions import resolve
from ..reporting.metrics import Share, combine
from ..rollout.tree import RolloutTree, Trajectory
from .arpo_trainer import ARPOTrainer
from .config import AEPOConfig
from .papers import PAPERS
from .rollout_batch import sampled_mask, with_guarded_logps


class AEPOTrainer(ARPOTrainer):
    """
    Trainer for Agentic Entropy-Balanced Policy Optimization (AEPO), from the paper [Agentic Entropy-Balanced Policy
    Optimization](https://huggingface.co/papers/2510.14545).

    It is an [`ARPOTrainer`] with four parts more, each with a switch in [`AEPOConfig`]: a pilot divides the rows of a
    prompt into roots and forks, consecutive forks of a path make the next one less likely, tokens clipped at 1+ε_h
    keep a gradient, and advantages are weighted by the entropy of their token.

    Example:

    ```python
    >>> from arpo_trl import AEPOConfig, AEPOTrainer

    >>> trainer = AEPOTrainer(
    ...     model="Qwen/Qwen3-8B",
    ...     args=AEPOConfig(num_generations=16, num_iterations=2, use_vllm=True),
    ...     reward_funcs=my_reward,
    ...     tools=[search],
    ...     train_dataset=dataset,
    ... )
    >>> trainer.train()
    ```

    Args:
        args ([`AEPOConfig`], *optional*):
            Configuration.
        model, reward_funcs, train_dataset, tools, ... :
            As in [`ARPOTrainer`].
    """

    _tag_names = ["trl", "aepo"]
    _name = "AEPO"
    _paper = PAPERS["AEPO"]

    def __init__(self, model, reward_funcs=None, args: AEPOConfig | None = None, *positional: Any, **kwargs: Any):
        if args is None:
            args = AEPOConfig()
        if not isinstance(args, AEPOConfig):
            raise TypeError(f"`args` must be an AEPOConfig, not {type(args).__name__}: it has AEPO's switches.")
        self._scores: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None
        self._token_objective = resolve("token objective", args.token_objective, TOKEN_OBJECTIVES)
        super().__init__(model, reward_funcs, args, *positional, **kwargs)

    # Rollout

    def _branching_options(self) -> BranchingOptions:
        args = self.args
        return dataclasses.replace(
            super()._branching_options(),
            stepped=args.stepped_branching,
            penalty=args.penalty_shape if args.branch_penalty else "none",
            gamma=args.branch_gamma,
            dynamic_budget=args.dynamic_budget,
            budget_beta=args.budget_beta,
            num_probes=args.num_probes,
            probe=args.probe,
        )

    def _num_initial(self) -> int:
        return self.args.min_initial_rollouts if self.args.dynamic_budget else super()._num_initial()

    # Entropies of the policy that sampled the rows

    def _get_per_token_logps_and_entropies(self, model, *args, compute_entropy: bool = False, **kwargs):
        # The first pass is the policy's. Under PEFT the reference's, which follows, goes through the same model.
        recording = self._scores is not None and not self._scores
        scores = super()._get_per_token_logps_and_entropies(
            model, *args, compute_entropy=compute_entropy or recording, **kwargs
        )
        if recording:
            self._scores.append(scores[:2])
        return scores

    @contextmanager
    def _recorded_scores(self) -> Iterator[list[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Within it the log-probabilities and entropies of the first forward pass are kept in the list it gives."""
        self._scores = []
        try:
            yield self._scores
        finally:
            self._scores = None

    @contextmanager
    def _forced_old_logps(self) -> Iterator[None]:
        """Within it TRL computes the log-probabilities of the policy that sampled, whether it needs them or not."""
        # TRL leaves the pass out where every row is used once, before the next generation. It reads that from these
        # numbers: with more iterations than accumulated steps no generation is ever aligned with an optimizer step.
        num_iterations, self.num_iterations = self.num_iterations, self.args.gradient_accumulation_steps + 1
        try:
            yield
        finally:
            self.num_iterations = num_iterations

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        args = self.args
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        if args.entropy_aware_advantage or args.unclipped_entropy_threshold is not None:
            with self._forced_old_logps(), self._recorded_scores() as scores:
                output = super()._generate_and_score_completions(inputs)
            entropies = scores[0][1]
            self._log_entropies(entropies, sampled_mask(output))
            if args.entropy_aware_advantage:
                output["advantages"] = self._weighted_advantages(output, entropies)
            if args.unclipped_entropy_threshold is not None:
                output["old_entropies"] = entropies
        else:
            output = super()._generate_and_score_completions(inputs)
        if args.tool_call_kl:
            output["tool_call_mask"] = self._position_mask(output, is_tool_call)
        return output

    def _weighted_advantages(self, output: dict[str, Any], entropies: torch.Tensor) -> torch.Tensor:
        advantages, mask = output["advantages"], sampled_mask(output)
        if self.args.entropy_advantage_form == "sigmoid":
            weighted = sigmoid_entropy_advantage(advantages, entropies, mask)
        else:
            statistics = self.accelerator.reduce(entropy_statistics(entropies, mask), reduction="sum")
            z = standardized_entropy(entropies, mask, statistics)
            weighted = entropy_aware_advantage(advantages, z, self.args.entropy_advantage_scale)
        before = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
        self._log_masked_mean("aepo/advantage_abs", before.abs().expand(mask.shape), mask)
        self._log_masked_mean("aepo/weighted_advantage_abs", weighted.abs(), mask)
        return weighted

    def _position_mask(self, output: dict[str, Any], chosen: Callable[[Trajectory, int], int]) -> torch.Tensor:
        """1 for the first `chosen(trajectory, i)` tokens of each row's segment i."""
        mask = torch.zeros_like(output["completion_mask"])
        for row, trajectory in enumerate(self._trajectories()):
            start = 0
            for i, segment in enumerate(trajectory.segments()):
                mask[row, start : start + chosen(trajectory, i)] = 1
                start += len(segment.ids)
        return mask

    # Loss

    def _compute_loss(self, model, inputs):
        changed = (
            self.args.token_objective != "ppo_clip"
            or self.args.unclipped_entropy_threshold is not None
            or self.args.tool_call_kl
        )
        if not (changed and self.model.training):
            return super()._compute_loss(model, inputs)
        inputs = with_guarded_logps(inputs)
        with self._recorded_scores() as scores:
            loss = super()._compute_loss(model, inputs)
        # The loss is linear in the tokens' losses, so that AEPO's is TRL's plus the mean of what differs.
        return loss + self._reduce(self._difference(*scores[0], inputs), inputs)

    def _difference(self, logps: torch.Tensor, entropies: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """AEPO's loss of each token less TRL's, of shape (B, T) or (B, 1)."""
        mask = sampled_mask(inputs)
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        old_logps = inputs.get("old_per_token_logps", logps.detach())
        log_ratio = logps - old_logps
        if self.importance_sampling_level == "sequence":
            log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)
        bounds = (self.epsilon_low, self.epsilon_high, self.args.delta)
        plain = surrogate = ppo_clip(log_ratio, advantages, *bounds)
        if self.args.unclipped_entropy_threshold is not None:
            surrogate = unclipped_above_entropy(
                log_ratio, advantages, inputs["old_entropies"], self.args.unclipped_entropy_threshold, *bounds
            )
        elif self.args.token_objective != "ppo_clip":
            surrogate = self._token_objective(log_ratio, advantages, *bounds)
            if self.args.entropy_balanced_clipping:
                self._log_clipping(clip_counts(log_ratio.detach(), advantages, mask, *bounds))
        difference = plain - surrogate
        if self.off_policy_mask_threshold is not None:
            sampling_logps = inputs.get("sampling_per_token_logps", old_logps)
            difference = difference * self.get_off_policy_mask(
                advantages, logps, sampling_logps, mask, self.off_policy_mask_threshold
            )
        if self.top_entropy_quantile < 1.0:
            difference = difference * self.get_high_entropy_mask(entropies, mask, 1 - self.top_entropy_quantile)
        if self.use_vllm and self.vllm_importance_sampling_correction:
            difference = difference * inputs["importance_sampling_ratio"]
        if self.args.tool_call_kl:
            difference = difference + self._kl_difference(logps, log_ratio, mask, inputs)
        return difference

    def _kl_difference(
        self, logps: torch.Tensor, log_ratio: torch.Tensor, mask: torch.Tensor, inputs: dict[str, Any]
    ) -> torch.Tensor:
        beta = decayed_beta(self.beta, self.state.global_step, self.args.kl_half_life)
        kl = scoped_kl(logps, inputs["ref_per_token_logps"], mask)
        difference = (beta * inputs["tool_call_mask"] - self.beta) * kl
        return difference * importance_ratio(log_ratio) if self.args.use_bias_correction_kl else difference

    def _reduce(self, per_token_loss: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """TRL's mean over a micro-batch, as a part of its accumulated step."""
        mask, steps = sampled_mask(inputs), self.current_gradient_accumulation_steps
        if self.loss_type == "grpo":
            return ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / steps
        total = (per_token_loss * mask).sum()
        if self.loss_type == "bnpo":
            return total / mask.sum().clamp(min=1.0) / steps
        if self.loss_type == "dr_grpo":
            return total / (mask.size(0) * self.max_completion_length) / steps
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return total / (tokens * steps / self.args.steps_per_generation)

    # Metrics

    def _log_rollout(self, mode: str, wall_s: float) -> None:
        super()._log_rollout(mode, wall_s)
        if mode == "eval" or self._sampler.branching is None:
            return
        shares = budget_shares(self._trees, self._sampler.branching, self._sampler.vocab_size)
        metrics = combine(gather_object([shares]), [{}], [{}])
        squares = metrics.pop("aepo/initial_rollouts_squared")
        spread = math.sqrt(max(0.0, squares - metrics["aepo/initial_rollouts"] ** 2))
        for name, value in {**metrics, "aepo/initial_rollouts_std": spread}.items():
            self._metrics[mode][name].append(value)

    def _log_entropies(self, entropies: torch.Tensor, mask: torch.Tensor) -> None:
        window = self.args.entropy_window
        after_tools = self._position_mask(
            {"completion_mask": mask}, lambda trajectory, i: min(window, after_tool_tokens(trajectory, i))
        )
        self._log_masked_mean("aepo/entropy_after_tools", entropies, mask * after_tools)
        self._log_masked_mean("aepo/entropy_elsewhere", entropies, mask * (1 - after_tools))

    def _log_clipping(self, counts: torch.Tensor) -> None:
        preserved, cut, tokens = self.accelerator.reduce(counts, reduction="sum").tolist()
        self._metrics["train"]["aepo/preserved_frac"].append(preserved / max(1.0, tokens))
        self._metrics["train"]["aepo/cut_frac"].append(cut / max(1.0, tokens))

    def _log_masked_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        local = torch.stack([values[mask.bool()].sum(), mask.sum().to(values.dtype)])
        total, count = self.accelerator.reduce(local, reduction="sum").tolist()
        if count:
            self._metrics["train"][name].append(total / count)


def after_tool_tokens(trajectory: Trajectory, i: int) -> int:
    """Tokens of the trajectory's segment i if it is a turn sampled after a tool result, else 0."""
    segments = trajectory.segments()
    return len(segments[i].ids) if i > 0 and segments[i].sampled and not segments[i - 1].sampled else 0


def is_tool_call(trajectory: Trajectory, i: int) -> int:
    """Tokens of the trajectory's segment i if it is a turn whose tool calls were answered, else 0."""
    segments = trajectory.segments()
    answered = segments[i].sampled and i + 1 < len(segments) and not segments[i + 1].sampled
    return len(segments[i].ids) if answered else 0


def budget_shares(trees: Iterable[RolloutTree], options: BranchingOptions, vocab_size: int) -> dict[str, Share]:
    """How the rollout trees of this process were divided into roots and forks.

    Entropies are normalized; N is the number of rows that started from the prompt and could fork.
    """
    trees = list(trees)

    def entropies(parents: bool) -> list[float]:
        return [
            normalize_entropy(segment.entropies.tolist(), options.norm, options.window, vocab_size)
            for tree in trees
            for segment in tree.segments()
            if segment.sampled and segment.entropies and (segment.parent is not None) == parents
        ]

    root, tool = entropies(parents=False), entropies(parents=True)
    initial = [sum(t.parent is None and t.can_fork for t in tree.trajectories) for tree in trees]
    most = [
        max(Counter(t.parent.slot for t in tree.trajectories if t.parent is not None).values(), default=0)
        for tree in trees
    ]
    distinct = [len({tuple(row.ids) for row in tree.rows(0)}) for tree in trees]
    penalties = [
        branch_penalty(decision["consecutive"], options.penalty, options.gamma)
        for tree in trees
        for decision in tree.decisions
    ]
    return {
        "aepo/root_entropy": Share(sum(root), len(root)),
        "aepo/tool_entropy": Share(sum(tool), len(tool)),
        "aepo/initial_rollouts": Share(sum(initial), len(trees)),
        "aepo/initial_rollouts_squared": Share(sum(n * n for n in initial), len(trees)),
        "aepo/penalty": Share(sum(penalties), len(penalties)),
        "aepo/most_forks_of_a_row": Share(sum(most), len(trees)),
        "aepo/distinct_rows": Share(sum(distinct), sum(tree.size for tree in trees)),
    }
