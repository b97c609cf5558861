"""Arguments of `scripts/evaluate.py`, and what they make."""

import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..extensions import is_known
from ..rewards.judge import LLMJudge
from ..rollout.dialects import DIALECTS, make_dialect
from ..rollout.engines.protocol import Engine
from ..rollout.sampler import Limits, Sampler
from ..tools.cache import ToolCache
from ..tools.options import call_limits
from ..tools.registry import ToolSet
from ..tools.runner import ToolRunner
from .generation import SamplerGenerator, WatchedEngine


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Arguments that the samples do not depend on: they may change when a run goes on.
_FREE = {"output_dir", "benchmarks", "limit", "n", "batch_size", "seed", "compare"}
_FREE |= {"tool_cache_dir", "packaged_model", "vllm_max_num_seqs", "vllm_gpu_memory_utilization", "server_url"}
_FREE |= {"judge_base_url", "judge_api_key_env", "judge_cache_dir", "check"}


@dataclass
class EvaluationArguments:
    """
    What to evaluate, on what, how. Arguments that a training recipe has, too, have its names.

    Args:
        model_name_or_path (`str`, *optional*):
            Folder or name on the Hub.
        packaged_model (`bool`, *optional*, defaults to `False`):
            Where the Hub cannot be reached, take the model from the Python package that carries it.
        benchmarks (`list[str]`):
            Names, `name=path`, or dotted paths of classes; see [`resolve_benchmark`].
        limit (`int`, *optional*):
            Only the first so many questions of each.
        n (`int`, *optional*, defaults to `1`):
            Samples a question.
        output_dir (`str`, *optional*, defaults to `"runs/evaluation"`):
            Samples and summaries; a run goes on where the last one in this folder stopped.
        compare (`list[str]`, *optional*):
            Two such folders to compare; nothing is sampled.
        check (`str`, *optional*, defaults to `"rule"`):
            `"rule"`, `"judge"` or `"both"`.
        judge_model, judge_base_url, judge_api_key_env, judge_cache_dir (`str`, *optional*):
            Of [`LLMJudge`].
        backend (`str`, *optional*, defaults to `"vllm"`):
            `"vllm"` in this process, `"transformers"`, or `"server"`.
        server_url, server_model (`str`, *optional*):
            URL (with `/v1`) and name of the model at the server; by default `model_name_or_path`, whose tokenizer is
            used.
        batch_size (`int`, *optional*, defaults to `256`):
            Samples in work at a time; they are written when all of them are done.
        others:
            As in training. Those of vLLM are for vLLM in this process; `vllm_max_model_length` also bounds the other
            backends.
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "Folder or name on the Hub."})
    packaged_model: bool = field(default=False, metadata={"help": "Without the Hub, take a packaged copy."})
    benchmarks: list[str] = field(
        default_factory=list, metadata={"help": "Benchmarks: a name, name=path, or the dotted path of a class."}
    )
    limit: int | None = field(default=None, metadata={"help": "Only the first so many questions of each."})
    n: int = field(default=1, metadata={"help": "Samples a question."})
    output_dir: str = field(default="runs/evaluation", metadata={"help": "Samples and summaries; resumed if there."})
    compare: list[str] = field(default_factory=list, metadata={"help": "Two output folders to compare, instead."})
    check: str = field(default="rule", metadata={"help": "Whose verdict counts: 'rule', 'judge' or 'both'."})
    judge_model: str | None = field(default=None, metadata={"help": "Name of the judge at its server."})
    judge_base_url: str | None = field(default=None, metadata={"help": "OpenAI-compatible URL of the judge."})
    judge_api_key_env: str = field(default="OPENAI_API_KEY", metadata={"help": "Variable that holds the judge's key."})
    judge_cache_dir: str | None = field(default=None, metadata={"help": "Folder that keeps verdicts."})
    backend: str = field(default="vllm", metadata={"help": "'vllm', 'transformers' or 'server'."})
    server_url: str | None = field(default=None, metadata={"help": "URL of an OpenAI-compatible server, with /v1."})
    server_model: str | None = field(default=None, metadata={"help": "The model's name at the server."})
    dialect: str = field(default="native", metadata={"help": "How tool calls look: 'native' or 'tagged'."})
    tools: list[str] = field(default_factory=list, metadata={"help": "Tools, as in a training recipe."})
    tool_cache_dir: str | None = field(default=None, metadata={"help": "Folder of the tool cache."})
    system_prompt: str | None = field(default=None, metadata={"help": "Template path, 'native', 'tagged' or 'none'."})
    max_completion_length: int = field(default=4096, metadata={"help": "Tokens of a row, tool results included."})
    max_tool_calling_iterations: int = field(default=10, metadata={"help": "Turns with tool calls a row may have."})
    max_tool_calls_per_turn: int = field(default=8, metadata={"help": "Calls of one turn that are run."})
    max_tool_result_length: int = field(default=1024, metadata={"help": "Tokens of the results of one tool turn."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; 0 is greedy."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling."})
    top_k: int = field(default=0, metadata={"help": "Sample among the k likeliest tokens; 0 is off."})
    min_p: float | None = field(default=None, metadata={"help": "Least probability relative to the likeliest token."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Penalty on tokens that occurred."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments of the chat template, a mapping (JSON on the command line)."}
    )
    seed: int = field(default=42, metadata={"help": "Seed of the engine."})
    dtype: str | None = field(default=None, metadata={"help": "Data type of the weights, e.g. bfloat16."})
    vllm_max_model_length: int | None = field(default=None, metadata={"help": "Longest sequence in tokens."})
    vllm_max_num_seqs: int = field(default=256, metadata={"help": "Sequences vLLM works on at once."})
    vllm_gpu_memory_utilization: float = field(default=0.9, metadata={"help": "Share of the GPU that vLLM takes."})
    batch_size: int = field(default=256, metadata={"help": "Samples in work at a time, written together."})

    def __post_init__(self):
        if isinstance(self.chat_template_kwargs, str):
            self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
        if self.compare:
            if len(self.compare) != 2:
                raise ValueError("`compare` takes two output folders.")
            return
        if self.model_name_or_path is None or not self.benchmarks:
            raise ValueError("Give `model_name_or_path` and `benchmarks`, or `compare` with two output folders.")
        for name, value, allowed in (
            ("backend", self.backend, ("vllm", "transformers", "server")),
            ("check", self.check, ("rule", "judge", "both")),
        ):
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(allowed)}; you gave {value!r}.")
        if "." not in self.dialect and not is_known("dialect", self.dialect, DIALECTS):
            known = ", ".join(DIALECTS)
            raise ValueError(
                f"`dialect` must be one of {known}, or the dotted path of your own; you gave {self.dialect!r}."
            )
        if self.n < 1 or self.batch_size < 1:
            raise ValueError(f"`n` and `batch_size` must be at least 1; you gave {self.n} and {self.batch_size}.")
        if self.backend == "server" and self.server_url is None:
            raise ValueError("backend='server' needs `server_url`, for example http://localhost:8000/v1.")
        if self.check != "rule" and not (self.judge_model and self.judge_base_url):
            raise ValueError(f"check={self.check!r} needs `judge_model` and `judge_base_url`.")

    def settings(self) -> dict[str, Any]:
        """What the samples depend on; a run in the same folder must agree."""
        return {name: value for name, value in vars(self).items() if name not in _FREE}


def make_judge(args: EvaluationArguments) -> LLMJudge | None:
    """The judge, where one is asked for."""
    if args.check == "rule":
        return None
    return LLMJudge(args.judge_model, args.judge_base_url, args.judge_api_key_env, cache_dir=args.judge_cache_dir)


def load_tokenizer(args: EvaluationArguments) -> tuple[str, "PreTrainedTokenizerBase", list[int]]:
    """Where the model is, its tokenizer, and the ids that end its turns."""
    from transformers import AutoTokenizer, GenerationConfig

    from ..demo.packaged_models import resolve_model

    model = resolve_model(args.model_name_or_path, packaged=args.packaged_model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    stops: int | list[int] | None = None
    with contextlib.suppress(OSError):  # models without a generation_config.json
        stops = GenerationConfig.from_pretrained(model).eos_token_id
    stops = [stops] if isinstance(stops, int) else list(stops or [])
    return model, tokenizer, stops


def make_generator(
    args: EvaluationArguments, model: str, tokenizer: "PreTrainedTokenizerBase", stops: list[int], tools: ToolSet
) -> SamplerGenerator:
    """
    The sampler of training without branching, over the backend that `args` names.

    Args:
        args ([`EvaluationArguments`]):
            The arguments.
        model, tokenizer, stops:
            From [`load_tokenizer`].
        tools ([`ToolSet`]):
            From [`resolve_tools`].
    """
    dialect = make_dialect(
        args.dialect,
        tokenizer,
        tools.tools,
        chat_template_kwargs=args.chat_template_kwargs,
        stop_token_ids=stops,
    )
    engine = _make_engine(args, model, tokenizer, dialect.stop_token_ids)
    if args.backend != "server" and args.temperature > 0:
        engine = WatchedEngine(engine)
    limits = Limits(
        completion_tokens=args.max_completion_length,
        tool_turns=args.max_tool_calling_iterations,
        calls_per_turn=args.max_tool_calls_per_turn,
        calls_per_tool=call_limits(tools.options),
        result_tokens=args.max_tool_result_length,
    )
    cache = ToolCache(args.tool_cache_dir) if args.tool_cache_dir else None
    runner = ToolRunner(tools.tools, tools.options, cache)
    sampler = Sampler(engine, dialect, runner, limits, seed=args.seed)
    return SamplerGenerator(sampler, tokenizer, tools.tools, args.dialect == "native", args.chat_template_kwargs)


def _make_engine(
    args: EvaluationArguments, model: str, tokenizer: "PreTrainedTokenizerBase", stops: frozenset[int]
) -> Engine:
    sampling = {"temperature": args.temperature, "top_p": args.top_p}
    further = {"top_k": args.top_k, "min_p": args.min_p, "repetition_penalty": args.repetition_penalty}
    if args.backend == "server":
        from ..rollout.engines.server_engine import ServerEngine, served_model_length

        name = args.server_model or args.model_name_or_path
        length = args.vllm_max_model_length or served_model_length(args.server_url, name)
        extra = {key: value for key, value in further.items() if value not in (None, 0, 1.0)}
        return ServerEngine(args.server_url, name, stops, length, tokenizer, **sampling, sampling=extra)
    if args.backend == "vllm":
        from ..rollout.engines.vllm_engine import VLLMEngine, build_llm

        options = {"dtype": args.dtype} if args.dtype else {}
        llm = build_llm(
            model,
            max_model_len=args.vllm_max_model_length,
            max_num_seqs=args.vllm_max_num_seqs,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            enable_prefix_caching=True,
            seed=args.seed,
            **options,
        )
        return VLLMEngine(llm, stops, **sampling, **further)
    import torch
    from transformers import AutoModelForCausalLM

    from ..rollout.engines.transformers_engine import TransformersEngine

    network = AutoModelForCausalLM.from_pretrained(model, dtype=args.dtype or "auto")
    network = network.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    length = args.vllm_max_model_length or network.config.get_text_config().max_position_embeddings
    return TransformersEngine(
        lambda: contextlib.nullcontext(network), stops, length, **sampling, **further, seed=args.seed
    )
