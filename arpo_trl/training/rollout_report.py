"""What a trainer tells of its rollouts: metrics, the rollout log, the model card."""

from typing import Any

import torch
from accelerate.utils import gather_object
from trl.trainer.utils import get_config_model_id

from ..reporting.completions_table import conversation_text
from ..reporting.metrics import combine, engine_shares, token_counts, tree_shares
from ..reporting.model_card import RunFacts, write_model_card
from ..reporting.rollout_log import ScoredRollout
from ..tools.calling import tool_schema
from .papers import PAPERS


class RolloutReportMixin:
    """Metrics of [`ARPOTrainer`] beyond TRL's, its rollout log and its model card."""

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        if self.is_world_process_zero():
            write_model_card(self._run_facts(), model_name, dataset_name, tags)

    def _run_facts(self) -> RunFacts:
        model = self.accelerator.unwrap_model(self.model)
        adapters = list(getattr(model, "peft_config", {}).values())
        schemas = [tool_schema(tool) for tool in self._shared_tools.values()]
        if self.environment_factories is not None:
            schemas += [schema for schemas_of_one in self._env_tools.values() for schema in schemas_of_one]
        sized = hasattr(self.train_dataset, "__len__")  # an iterable dataset, or none, is not
        return RunFacts(
            algorithm=self._name if self.args.branching else "GRPO",
            trainer=self._name,
            args=self.args,
            log_history=self.state.log_history,
            steps=self.state.global_step,
            base_model=adapters[0].base_model_name_or_path if adapters else get_config_model_id(model.config) or None,
            is_adapter=bool(adapters),
            tools=[schema["function"] for schema in schemas],
            num_prompts=len(self.train_dataset) if sized else None,
            repo_id=self.hub_model_id,
            papers=PAPERS,
        )

    def log(self, logs, start_time=None):
        completions = self._logs["completion"]
        for index, completion in enumerate(completions):
            completions[index] = conversation_text(completion)
        super().log(logs, start_time)

    def _write_rollout_log(self, mode: str, output: dict[str, Any]) -> None:
        if self.rollout_log is not None:
            self.rollout_log.write(
                ScoredRollout(
                    step=self.state.global_step,
                    evaluation=mode == "eval",
                    trees=self._trees,
                    rewards=self._row_rewards,
                    advantages=output["advantages"].tolist(),
                    reward_names=self.reward_func_names,
                )
            )

    def _log_masked_tokens(self, mode: str, output: dict[str, Any]) -> None:
        """Which share of the sampled tokens the importance-sampling correction leaves out."""
        if "importance_sampling_ratio" in output:
            mask = (output["completion_mask"] * output["tool_mask"]).bool()
            dropped = (output["importance_sampling_ratio"].expand(mask.shape) == 0) & mask
            totals = self.accelerator.reduce(torch.stack([dropped.sum(), mask.sum()]).float(), reduction="sum")
            self._metrics[mode]["sampling/masked_token_frac"].append((totals[0] / totals[1].clamp(min=1)).item())

    def _log_lengths(self, mode: str, prompt_ids: list[list[int]]) -> None:
        """TRL's metrics of completions, where a row counts as cut off by its finish reason."""
        rows = [
            (len(ids), sum(row.mask), trajectory.truncated)
            for ids, row, trajectory in zip(prompt_ids, self._rows, self._trajectories(), strict=True)
        ]
        prompt_tokens, lengths, truncated = self.accelerator.gather(
            torch.tensor(rows, device=self.accelerator.device)
        ).T
        if mode == "train":
            self.state.num_input_tokens_seen += (prompt_tokens.sum() + lengths.sum()).item()
        metrics = self._metrics[mode]
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        metrics["completions/clipped_ratio"].append(truncated.float().mean().item())
        terminated = lengths[truncated == 0]
        for name, values in (("", lengths), ("terminated_", terminated if len(terminated) else torch.zeros(1))):
            metrics[f"completions/mean_{name}length"].append(values.float().mean().item())
            metrics[f"completions/min_{name}length"].append(values.float().min().item())
            metrics[f"completions/max_{name}length"].append(values.float().max().item())

    def _log_rollout(self, mode: str, wall_s: float) -> None:
        sampled_here = self._tensor_parallel is None or self._tensor_parallel.leads
        shares = {**tree_shares(self._trees), **engine_shares(self._sampler, wall_s, sampled_here)}
        local = (shares, token_counts(self._trees), self._tool_runner.stats())
        metrics = combine(*zip(*gather_object([local]), strict=True))
        if self._has_tools:
            failures = sum(value for name, value in metrics.items() if name.endswith("/failures"))
            rows = len(self._rows) * self.accelerator.num_processes
            metrics["tools/call_frequency"] = metrics["rollout/tool_calls"] / rows
            metrics["tools/failure_frequency"] = failures / max(1.0, metrics["rollout/tool_calls"])
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _sample_row(self) -> str:
        """The beginning of one of the last rows, for a person to read."""
        return self._tokenizer.decode(self._rows[0].ids)[:1000] if self._rows else ""
