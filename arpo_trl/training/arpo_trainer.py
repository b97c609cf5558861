"""`ARPOTrainer`: TRL's `GRPOTrainer` with rollouts that fork."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from ..algorithms.fork_rules import FORK_RULES, BranchingOptions
from ..data.columns import unpadded
from ..extensions import resolve
from ..reporting.console import Console
from ..reporting.rollout_log import RolloutLog
from ..reporting.warnings import TrainingWarnings
from ..rollout.dialects import make_dialect
from ..rollout.engines.protocol import Engine
from ..rollout.engines.tensor_parallel import TensorParallelRollout
from ..rollout.environments import check_tool_names, shown_schemas
from ..rollout.sampler import Limits, Sampler
from ..rollout.tree import RolloutTree, Row
from ..tools import rate
from ..tools.cache import ToolCache
from ..tools.calling import tools_by_name
from ..tools.options import ToolOptions, call_limits
from ..tools.runner import ToolRunner
from .adapters import check_adapters_for_vllm, is_adapter, load_adapter
from .checkpoints import RolloutCheckpointMixin
from .config import ARPOConfig
from .engines import make_engine
from .papers import PAPERS
from .prefix_sharing import PrefixSharingMixin, TokenMicroBatchMixin
from .rollout_batch import RolloutBatchMixin
from .rollout_report import RolloutReportMixin
from .sharding import ShardingMixin
from .trl_compat import check_rollout_func, check_server_mode, check_trl, check_vllm, replaced_vllm_generation


class ARPOTrainer(
    RolloutBatchMixin,
    RolloutReportMixin,
    RolloutCheckpointMixin,
    TokenMicroBatchMixin,
    PrefixSharingMixin,
    ShardingMixin,
    GRPOTrainer,
):
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
            calls_per_tool=call_limits(tool_options),
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


def reads_entropy(reward: Callable) -> bool:
    """Whether a reward function says, by an attribute `reads_entropy`, that it compares rows by their entropy."""
    return getattr(reward.func if isinstance(reward, functools.partial) else reward, "reads_entropy", False)
