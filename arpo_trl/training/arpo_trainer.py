"""`ARPOTrainer`: TRL's `GRPOTrainer` with rollouts that fork."""

import contextlib
import functools
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.data_utils import is_conversational
from trl.trainer.utils import get_config_model_id

from ..algorithms.credit import CREDIT_RULES, CreditRows, token_identities
from ..algorithms.fork_rules import FORK_RULES, BranchingOptions
from ..data.columns import unpadded
from ..extensions import resolve
from ..reporting.completions_table import conversation_text, table_columns
from ..reporting.console import Console
from ..reporting.metrics import combine, engine_shares, token_counts, tree_shares
from ..reporting.model_card import RunFacts, write_model_card
from ..reporting.rollout_log import RolloutLog, ScoredRollout
from ..reporting.warnings import TrainingWarnings
from ..rewards.conversation import last_user_text
from ..rollout.dialects import make_dialect
from ..rollout.engines.protocol import Engine
from ..rollout.engines.tensor_parallel import TensorParallelRollout
from ..rollout.environments import Environments, check_tool_names, shown_schemas
from ..rollout.sampler import Limits, Prompt, Sampler
from ..rollout.tree import RolloutTree, Row, Trajectory
from ..tools import rate
from ..tools.cache import ToolCache
from ..tools.calling import tool_schema, tools_by_name
from ..tools.options import ToolOptions
from ..tools.runner import ToolRunner
from .adapters import check_adapters_for_vllm, is_adapter, load_adapter
from .checkpoints import RolloutCheckpointMixin
from .config import ARPOConfig
from .engines import make_engine
from .papers import PAPERS
from .prefix_sharing import PrefixSharingMixin, TokenMicroBatchMixin
from .sharding import ShardingMixin
from .trl_compat import check_server_mode, check_trl, check_vllm, replaced_vllm_generation


class ARPOTrainer(RolloutCheckpointMixin, TokenMicroBatchMixin, PrefixSharingMixin, ShardingMixin, GRPOTrainer):
    """
    Trainer for Agentic Reinforced Policy Optimization (ARPO), from the paper [Agentic Reinforced Policy
    Optimization](https://huggingface.co/papers/2507.19849).

    It is a [`~trl.GRPOTrainer`] whose rows are sampled in trees: after a tool result that made the model uncertain a
    row may fork. With `branching=False` it is `GRPOTrainer` with tools that run while the model generates.

    Example:

    ```python
    >>> from arpo_trl import ARPOConfig, ARPOTrainer
    >>> from arpo_trl.rewards import arpo_reward
    >>> from datasets import load_dataset

    >>> def search(query: str) -> str:
    ...     '''Searches the web.
    ...
    ...     Args:
    ...         query: What to look for.
    ...     '''
    ...     return my_search_engine(query)

    >>> trainer = ARPOTrainer(
    ...     model="Qwen/Qwen3-8B",
    ...     args=ARPOConfig(num_generations=16, use_vllm=True),
    ...     reward_funcs=arpo_reward,
    ...     tools=[search],
    ...     train_dataset=load_dataset("my/questions", split="train"),
    ... )
    >>> trainer.train()
    ```

    Args:
        args ([`ARPOConfig`], *optional*):
            Configuration.
        tools (`list`, *optional*):
            Typed functions with docstrings, sync or async, or objects with `name`, `schema` and `__call__`; see
            [`arpo_trl.tools.contract`].
        tool_options (`Mapping[str, ToolOptions]`, *optional*):
            Timeout, retries, concurrency and so on of a tool, by its name.
        tool_cache ([`ToolCache`], *optional*):
            Where tools whose options ask for it keep their answers.
        model, reward_funcs, train_dataset, environment_factory, ... :
            As in [`~trl.GRPOTrainer`]. `model` may also be an adapter, a folder or on the Hub, which is trained further:
            its own settings hold, whatever `peft_config` says.

    Raises:
        ValueError: For arguments that do not go together; the message says what to change.
    """

    _tag_names = ["trl", "arpo"]
    _name = "ARPO"
    _paper = PAPERS["ARPO"]

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: ARPOConfig | None = None,
        train_dataset=None,
        *others: Any,
        tools: list[Callable] | None = None,
        tool_options: Mapping[str, ToolOptions] | None = None,
        tool_cache: ToolCache | None = None,
        environment_factory=None,
        rollout_func=None,
        **kwargs: Any,
    ):
        check_trl()
        # TRL takes them by position, too: the parameters of its constructor after `train_dataset`.
        kwargs |= zip(list(inspect.signature(GRPOTrainer.__init__).parameters)[5:], others)
        if args is None:
            args = ARPOConfig()
        self._check_arguments(args, tools, environment_factory, rollout_func)
        if args.use_vllm:
            options = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
            check_adapters_for_vllm(model, kwargs.get("peft_config"), options)
        if isinstance(model, str) and is_adapter(model, (args.model_init_kwargs or {}).get("revision")):
            model = load_adapter(model, args, kwargs)
        tools = list(tools or [])
        if kwargs.get("eval_dataset") is not None:
            kwargs["eval_dataset"] = unpadded(kwargs["eval_dataset"], "prompt")
        replaced = contextlib.nullcontext()
        if args.use_vllm:
            engine_kwargs = {"max_num_batched_tokens": args.vllm_max_num_batched_tokens}
            if args.vllm_max_num_seqs is not None:
                engine_kwargs["max_num_seqs"] = args.vllm_max_num_seqs
            if args.cast_lm_head_to_fp32:
                engine_kwargs["hf_overrides"] = {"head_dtype": "float32"}
            replaced = replaced_vllm_generation(
                enforce_eager=args.vllm_enforce_eager, block_size=args.vllm_block_size, engine_kwargs=engine_kwargs
            )
        with replaced:
            super().__init__(
                model,
                reward_funcs,
                args=args,
                train_dataset=unpadded(train_dataset, "prompt"),
                # Tagged calls are running text: the template knows nothing of tools.
                tools=tools if args.dialect == "native" else None,
                environment_factory=environment_factory,
                **kwargs,
            )
        # TRL only renders them from here on: as the schemas our tools declare, without arguments the runner fills in.
        self.tools = shown_schemas(self.tools, len(tools))
        if self.environment_factories is not None:
            self._env_tools = {name: shown_schemas(own, len(tools)) for name, own in self._env_tools.items()}
        # TRL binds tools to rows itself only where its own loop calls them; ours are bound by `Environments`.
        self._standalone_tools = []
        self._shared_tools = tools_by_name(tools)
        # A row's last id does not tell whether it was cut off, so the mask is made in `_generate`.
        self._mask_truncated_rows, self.mask_truncated_completions = self.mask_truncated_completions, False
        self._rollouts = {"train": 0, "eval": 0}
        self._trees: list[RolloutTree] = []
        self._rows: list[Row] = []
        self._row_rewards: list[list[float]] = []
        self.rollout_log = None
        if args.rollout_log:
            self.rollout_log = RolloutLog(
                args.output_dir,
                self._tokenizer,
                args.rollout_log_max_mb,
                self.accelerator.process_index,
                self.accelerator.num_processes,
            )
            self.add_callback(self.rollout_log)
        self._console = Console.install(self)
        dialect = args.dialect if self._has_tools else None
        self._warnings = TrainingWarnings(self._metrics["train"], dialect, self._sample_row)
        self.add_callback(self._warnings)
        shared = self.accelerator.num_processes > 1
        rate_folder = Path(args.output_dir, rate.FOLDER) if shared else None
        self._tool_runner = ToolRunner(self._shared_tools, tool_options, tool_cache, rate_folder)
        try:
            self._sampler = self._make_sampler(tool_options or {})
        except BaseException:
            self.close_tools()
            raise

    def close_tools(self) -> None:
        """Ends the threads and processes in which tools run, after the last rollout. What a tool opened itself is closed
        by whoever made it."""
        self._tool_runner.close()

    @staticmethod
    def _check_arguments(args, tools, environment_factory, rollout_func) -> None:
        if not isinstance(args, ARPOConfig):
            raise TypeError(
                f"`args` must be an ARPOConfig, not {type(args).__name__}: it has the options of rollouts."
            )
        check_rollout_func(rollout_func)
        if args.dialect != "native" and environment_factory is not None:
            raise ValueError("`environment_factory` offers tools by their schema. Use it with dialect='native'.")
        if args.branching and not (tools or environment_factory):
            raise ValueError("Rows fork after tool results, but there are no tools. Pass `tools`, or branching=False.")
        if args.engine not in (None, "vllm") and args.use_vllm or args.engine == "vllm" and not args.use_vllm:
            raise ValueError(f"engine={args.engine!r} does not go with use_vllm={args.use_vllm}: change one of them.")
        check_tool_names(tools or (), environment_factory)
        if args.use_vllm:
            check_vllm()
        if args.use_vllm and args.vllm_mode == "server":
            check_server_mode(args)
        grouped = args.use_vllm and args.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1
        if grouped and environment_factory is not None:
            raise ValueError(
                "Environments live in one process each, but with vllm_tensor_parallel_size > 1 one process calls the "
                "tools of several. Use vllm_tensor_parallel_size=1."
            )

    # What the sampler is made of

    def _make_sampler(self, tool_options: Mapping[str, ToolOptions]) -> Sampler:
        args = self.args
        self._dialect = make_dialect(
            args.dialect,
            self.processing_class,
            tools=list(self._shared_tools.values()),
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            stop_token_ids=self.eos_token_ids,
        )
        limits = Limits(
            completion_tokens=self.max_completion_length,
            tool_turns=self.max_tool_calling_iterations if self._has_tools else sys.maxsize,
            calls_per_turn=args.max_tool_calls_per_turn,
            calls_per_tool={
                name: options.max_calls_per_trajectory
                for name, options in tool_options.items()
                if options.max_calls_per_trajectory is not None
            },
            result_tokens=args.max_tool_result_length,
            seconds=args.rollout_timeout,
        )
        engine = self._make_engine()
        return Sampler(
            engine,
            self._dialect,
            self._tool_runner,
            limits,
            branching=self._branching_options() if args.branching else None,
            num_initial=self._num_initial(),
            vocab_size=self.model.config.get_text_config().vocab_size,
            seed=args.seed,
            lockstep=args.deterministic_rollouts,
            seed_requests=self._tensor_parallel is not None,
            measured=args.entropy_window if any(map(reads_entropy, self.reward_funcs)) else 0,
            on_progress=self._console.progress,
        )

    @property
    def _has_tools(self) -> bool:
        return bool(self._shared_tools or self.environment_factories)

    def _branching_options(self) -> BranchingOptions:
        args = self.args
        return BranchingOptions(
            alpha=args.branch_alpha,
            beta=args.branch_beta,
            rule=resolve("fork rule", args.branch_rule, FORK_RULES),
            threshold=args.branch_threshold,
            norm=args.entropy_norm,
            window=args.entropy_window,
            order=args.fork_order,
            factor=args.branch_factor,
        )

    def _num_initial(self) -> int:
        return self.args.num_initial_rollouts

    def _make_engine(self) -> Engine:
        self._tensor_parallel = None
        engine = make_engine(self, self._dialect.stop_token_ids)
        if not self.use_vllm or self.vllm_mode == "server" or self.vllm_tensor_parallel_size == 1:
            return engine
        self._tensor_parallel = TensorParallelRollout(
            engine, self.vllm_tensor_parallel_size, timedelta(seconds=self.args.ddp_timeout)
        )
        return self._tensor_parallel.engine

    # TRL's contract: prompts in, rows out

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
        if "importance_sampling_ratio" in output:
            mask = (output["completion_mask"] * output["tool_mask"]).bool()
            dropped = (output["importance_sampling_ratio"].expand(mask.shape) == 0) & mask
            totals = self.accelerator.reduce(torch.stack([dropped.sum(), mask.sum()]).float(), reduction="sum")
            self._metrics[mode]["sampling/masked_token_frac"].append((totals[0] / totals[1].clamp(min=1)).item())
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

    # Metrics

    def log(self, logs, start_time=None):
        completions = self._logs["completion"]
        for index, completion in enumerate(completions):
            completions[index] = conversation_text(completion)
        super().log(logs, start_time)

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

    def _trajectories(self) -> list[Trajectory]:
        return [trajectory for tree in self._trees for trajectory in tree.trajectories]


def check_rollout_func(rollout_func: Callable | None) -> None:
    """Refuses TRL's `rollout_func`."""
    if rollout_func is not None:
        raise ValueError("`rollout_func` replaces what ARPOTrainer is for. Remove it, or use TRL's GRPOTrainer.")


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


def reads_entropy(reward: Callable) -> bool:
    """Whether a reward function says, by an attribute `reads_entropy`, that it compares rows by their entropy."""
    return getattr(reward.func if isinstance(reward, functools.partial) else reward, "reads_entropy", False)


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
