"""From TRL's prompts to a rollout, and from its trees to the rows of a TRL batch."""

import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trl.data_utils import is_conversational

from ..algorithms.credit import CREDIT_RULES, CreditRows, token_identities
from ..extensions import resolve
from ..reporting.completions_table import table_columns
from ..rewards.conversation import last_user_text
from ..rollout.environments import Environments
from ..rollout.sampler import Prompt
from ..rollout.tree import RolloutTree, Trajectory
from .trl_compat import check_rollout_func


class RolloutBatchMixin:
    """What [`ARPOTrainer`] gives TRL in the place of its own generation: prompts in, rows out."""

    def _generate(self, prompts: list):
        check_rollout_func(self.rollout_func)  # someone may have set it since
        mode = "train" if self.model.training else "eval"
        if self.use_vllm and self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step = self.state.global_step
        began = time.perf_counter()
        # Evaluation never forks, and its groups may be split over processes: every row is a tree of its own.
        size = self.num_generations if mode == "train" else 1
        prompt_ids, images = self._tokenize(prompts, size)
        groups = self._groups(prompts, prompt_ids, images, size)
        trees = self._trees = self._sample(groups, mode)
        self._rollouts[mode] += 1
        for index, (tree, group) in enumerate(zip(trees, groups, strict=True)):
            self._adopt(tree, group, index * size, prompts, prompt_ids, images)
        self._tool_runner.forget_environments()
        trajectories = self._trajectories()
        rows = self._rows = [row for tree in trees for row in tree.rows(self._tokenizer.pad_token_id)]
        if is_conversational({"prompt": prompts[0]}):
            completions = [row.messages for row in rows]
        else:
            completions = self.processing_class.batch_decode([row.ids for row in rows], skip_special_tokens=True)
        tool_images = [row.images for row in rows]
        if any(tool_images):
            images = [(own or []) + new for own, new in zip(images or [None] * len(rows), tool_images, strict=True)]
        self._log_lengths(mode, prompt_ids)
        if self._mask_truncated_rows:
            for row, trajectory in zip(rows, trajectories, strict=True):
                if trajectory.truncated:
                    row.mask = [0] * len(row.mask)
        self._log_rollout(mode, time.perf_counter() - began)
        return (
            prompt_ids,
            [row.ids for row in rows],
            [row.mask for row in rows],
            completions,
            [row.logprobs for row in rows] if self.use_vllm else None,
            {"rollout_info": [rollout_info(trajectory) for trajectory in trajectories]},
            images,
            tool_images,
        )

    def _tokenize(self, prompts: list, size: int) -> tuple[list[list[int]], list | None]:
        """Token ids and images of every row; those of a group are alike unless environments added something."""
        if self.environment_factories is not None:
            prompt_ids, images, _ = self._tokenize_prompts(prompts)
            return prompt_ids, images
        prompt_ids, images, _ = self._tokenize_prompts(prompts[::size])
        repeated = [ids for ids in prompt_ids for _ in range(size)]
        return repeated, [image for image in images for _ in range(size)] if images else None

    def _groups(self, prompts: list, prompt_ids: list[list[int]], images: list | None, size: int) -> list[Prompt]:
        first_row = self.accelerator.process_index * len(prompt_ids)
        groups = []
        for start in range(0, len(prompt_ids), size):
            rows = slice(start, start + size)
            environments = Environments(self._shared_tools, self.environments[rows] if self.environments else None)
            question = last_user_text(prompts[start])
            groups.append(
                Prompt(prompt_ids[rows], first_row + start, environments, images[rows] if images else None, question)
            )
        return groups

    def _sample(self, groups: list[Prompt], mode: str) -> list[RolloutTree]:
        run = functools.partial(self._sampler.run, generation=self._rollouts[mode], training=mode == "train")
        if self._tensor_parallel is None:
            return run(groups)

        def sample_all(brought: list[list[tuple]]) -> list[list[RolloutTree]]:
            shared = Environments(self._shared_tools)
            trees = iter(run([Prompt(ids, row, shared, *rest) for part in brought for ids, row, *rest in part]))
            return [[next(trees) for _ in part] for part in brought]

        if self.accelerator.device.type == "cuda":
            # All ranks meet in `run`. vLLM's collectives must not meet those of the update that are still under way on
            # another stream (huggingface/trl#3671).
            torch.cuda.synchronize()
        mine = [(group.ids, group.row, group.images, group.question) for group in groups]
        return self._tensor_parallel.run(mine, sample_all)

    def _adopt(
        self, tree: RolloutTree, group: Prompt, start: int, prompts: list, prompt_ids: list, images: list | None
    ) -> None:
        """TRL resets an environment for every row; a fork has its parent's prompt, images and environment instead."""
        for trajectory in tree.trajectories:
            row, source = start + trajectory.slot, start + trajectory.source
            prompts[row], prompt_ids[row] = prompts[source], prompt_ids[source]
            if images:
                images[row] = images[source]
            if self.environments:
                self.environments[row] = group.environments.instances[trajectory.slot]
                if self._tool_runner.acts_on(self.environments[row]):
                    self._replace_environment(row)

    def _replace_environment(self, row: int) -> None:
        """A new environment, reset, for one on which a call that was given up may still act, now and in TRL's pool."""
        columns, name = dict(self._inputs[row]), None
        if None not in self.environment_factories:
            name = columns.pop("environment")
        lost, self.environments[row] = self.environments[row], self.environment_factories[name]()
        self.environments[row].reset(**columns)
        pool = self._environment_pool[name]
        pool[:] = [self.environments[row] if kept is lost else kept for kept in pool]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        output = super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        self._write_rollout_log(mode, output)
        self._log_masked_tokens(mode, output)
        if mode == "train" and self.args.attribution != "soft":
            advantages = output["advantages"]
            identities = token_identities(self._paths(), output["completion_ids"].size(1)).to(advantages.device)
            trained = self._scored & sampled_mask(output).any(dim=1)
            rule = resolve("credit rule", self.args.attribution, CREDIT_RULES)
            output["advantages"] = rule(CreditRows(advantages, identities, trained))
        return output

    def _paths(self) -> list[list[tuple[int, int]]]:
        """The path of every row through its tree, with segment numbers that no two trees share."""
        paths, offset = [], 0
        rows = iter(self._rows)
        for tree in self._trees:
            paths += [[(offset + number, size) for number, size in next(rows).segments] for _ in tree.trajectories]
            offset += sum(1 for _ in tree.segments())
        return paths

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # A tool's backend failed, or there is nothing that the policy could have done better.
        infos = [row.get("rollout_info", {"infrastructure_failure": False, "sampled": True}) for row in inputs]
        unscored = [info["infrastructure_failure"] or not info["sampled"] for info in infos]
        unscored = self.accelerator.gather(torch.tensor(unscored, device=rewards.device))
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["rollout/unscored_rows"].append(
            rewards.isnan().all(dim=1).logical_or(unscored).float().mean().item()
        )
        rewards[unscored] = torch.nan
        refuse_infinite(rewards, self.reward_func_names)
        if self.log_completions:
            for column, values in table_columns(self._trajectories()).items():
                self._log_completion_extra(column, values)
        first = self.accelerator.process_index * len(prompts)
        own = rewards[first : first + len(prompts)]
        self._row_rewards, self._scored = own.tolist(), ~own.isnan().all(dim=1)
        return rewards

    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, with_guarded_logps(inputs))

    def _trajectories(self) -> list[Trajectory]:
        return [trajectory for tree in self._trees for trajectory in tree.trajectories]


def sampled_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """1 for the tokens of a TRL batch that the policy sampled, of shape (B, T)."""
    mask = inputs["completion_mask"]
    return mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]


def with_guarded_logps(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The batch with old and reference log-probabilities that TRL's loss can take whatever they are: it multiplies
    exponentials of their differences by the mask, and 0 · inf is not 0."""
    guarded, masked = dict(inputs), sampled_mask(inputs) == 0
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if name in guarded:
            guarded[name] = guarded[name].masked_fill(masked, 0.0)
    if "old_per_token_logps" in guarded:
        # log π_θ is at most 0, so that the ratio is at most exp(80), which float32 holds.
        guarded["old_per_token_logps"] = guarded["old_per_token_logps"].clamp(min=-80.0)
    return guarded


def refuse_infinite(rewards: torch.Tensor, names: Sequence[str]) -> None:
    """Raises `ValueError` where a reward of (B, number of functions) is infinite: it would make the loss infinite, and
    then the weights."""
    for row, column in rewards.isinf().nonzero().tolist():
        raise ValueError(
            f"The reward function '{names[column]}' gave {rewards[row, column].item()} for row {row} of this rollout; "
            "let it give a finite number (below 3.4e38), or None for a row that it cannot score."
        )


def rollout_info(trajectory: Trajectory) -> dict[str, Any]:
    """What reward functions learn of a row beyond its messages, as the column `rollout_info`.

    Returns:
        `dict`: `finish_reason` (`str`), `tool_calls` (`dict[str, int]`, executed calls by tool), `tool_failures` (`int`,
        with calls that were not executed), `infrastructure_failure` and `sampled` (`bool`: with the first, or if nothing
        was sampled for this row itself, its reward will be `None`), `tool_turns` (`int`), `forked` (`bool`) and
        `mean_entropy` (`float`, nats, over the watched tokens; `None` where none were).
        Watched are the first `entropy_window` tokens of each turn where a reward function has an attribute
        `reads_entropy = True`; otherwise only where a decision to fork asks for them, which differs from row to row.
    """
    results = trajectory.results()
    entropies = [entropy for segment in trajectory.segments() for entropy in segment.entropies]
    return {
        "finish_reason": trajectory.finish_reason,
        "tool_calls": dict(Counter(result.name for result in results if result.executed)),
        "tool_failures": sum(result.failure is not None for result in results),
        "infrastructure_failure": any(result.failure == "infrastructure" for result in results),
        "sampled": trajectory.sampled,
        "tool_turns": trajectory.turns,
        "forked": trajectory.parent is not None,
        "mean_entropy": sum(entropies) / len(entropies) if entropies else None,
    }
