"""The checks of a recipe: everything that can be known before the first step, without loading the model's weights."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .findings import Finding, guarded, installed_version
from .read_recipe import Recipe, needs_bitsandbytes, read_recipe
from .resources import check_memory, check_sizes


# Arguments of a trial call, by the type that the tool's schema asks for.
MADE_UP = {"string": "1+1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}


def examine_recipe(path: str, algorithm: str | None, overrides: list[str]) -> Iterator[Finding]:
    """Checks that need one another's results are left out where those failed; see [`examine`]."""
    for finding in guarded("recipe", read_recipe, path, algorithm, overrides):
        if isinstance(finding, Recipe):
            yield from examine_arguments(finding)
        else:
            yield finding


def examine_arguments(recipe: Recipe) -> Iterator[Finding]:
    """Checks of a recipe that has been parsed."""
    sys.path.insert(0, os.getcwd())  # dotted paths into the user's own folder, as the scripts do
    yield from guarded("packages", _check_packages, recipe)
    yield from guarded("accounts", _check_accounts, recipe)
    yield from guarded("rewards", _check_rewards, recipe)
    yield from guarded("tools", _check_tools, recipe)
    yield from guarded("model", _check_model, recipe)
    if recipe.tokenizer is not None:
        yield from guarded("dialect", _check_dialect, recipe)
        yield from guarded("rollout", _check_rollout, recipe)
    yield from guarded("data", _check_data, recipe)
    yield from guarded("sizes", check_sizes, recipe)
    if recipe.config is not None:
        yield from guarded("memory", check_memory, recipe)
    if recipe.tools is not None:
        recipe.tools.close()


def _check_packages(recipe: Recipe) -> Iterator[Finding]:
    wanted = {
        "vllm": recipe.args.use_vllm,
        "peft": recipe.model_args.use_peft,
        "bitsandbytes": needs_bitsandbytes(recipe.args, recipe.model_args),
        "wandb": "wandb" in recipe.args.report_to,
        "trackio": "trackio" in recipe.args.report_to,
        "tensorboard": "tensorboard" in recipe.args.report_to,
        "deepspeed": recipe.launch.sharding.startswith("zero"),
        "flash-attn": recipe.model_args.attn_implementation == "flash_attention_2",
    }
    extras = {"vllm": "vllm", "peft": "peft", "wandb": "wandb", "trackio": "reporting", "tensorboard": "reporting"}
    missing = [name for name, is_wanted in wanted.items() if is_wanted and installed_version(name) is None]
    for name in missing:
        what = f"arpo-trl[{extras[name]}]" if name in extras else name
        yield Finding("packages", "problem", f'The recipe needs {name}: run `pip install "{what}"`.')
    if not missing:
        yield Finding("packages", "ok", "all that the recipe needs are installed")


def _check_accounts(recipe: Recipe) -> Iterator[Finding]:
    args = recipe.args
    if args.push_to_hub:
        from huggingface_hub import get_token

        if get_token() is None:
            yield Finding(
                "accounts",
                "problem",
                "The recipe pushes to the Hub and there is no token: run `hf auth login`, set HF_TOKEN, or set "
                "push_to_hub: false.",
            )
    if "wandb" in args.report_to and os.environ.get("WANDB_MODE") not in ("offline", "disabled", "dryrun"):
        netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
        if not os.environ.get("WANDB_API_KEY") and not (netrc.is_file() and "wandb" in netrc.read_text()):
            yield Finding(
                "accounts",
                "problem",
                "The recipe reports to wandb and there is no API key: run `wandb login`, set WANDB_API_KEY, or set "
                "WANDB_MODE=offline.",
            )


def _check_rewards(recipe: Recipe) -> Iterator[Finding]:
    from ...rewards.registry import resolve_rewards

    rewards = resolve_rewards(recipe.script_args.reward_funcs, recipe.script_args.reward_kwargs)
    names = [getattr(reward, "__name__", type(reward).__name__) for reward in rewards]
    yield Finding("rewards", "ok", ", ".join(names))


def _check_tools(recipe: Recipe) -> Iterator[Finding]:
    """A real call to each tool: the recipe's, else one with made-up arguments, which may fail without consequence."""
    from ...tools.registry import resolve_tools

    with resolve_tools(recipe.script_args.tools) as recipe.tools:
        yield from _call_tools(recipe)


def _call_tools(recipe: Recipe) -> Iterator[Finding]:
    from ...extensions import load_object
    from ...rollout.environments import check_tool_names, factory_tools
    from ...tools.calling import tool_name, tool_schema
    from ...tools.contract import ToolCall, ToolContext
    from ...tools.runner import ToolRunner

    tools = recipe.tools
    if recipe.script_args.environment_factory:
        recipe.environment_factory = load_object(recipe.script_args.environment_factory)
        check_tool_names(tools.tools, recipe.environment_factory)
        recipe.environment_tools = factory_tools(recipe.environment_factory)
        names = ", ".join(tool_name(tool) for tool in recipe.environment_tools)
        yield Finding("tools", "ok", f"environment {recipe.script_args.environment_factory} with {names}")
    elif not tools.tools and recipe.args.branching:
        yield Finding(
            "tools",
            "problem",
            "Rows fork after tool results, but there are no tools: set `tools`, or branching: false.",
        )
        return
    tools.preflight()
    untried = []
    for tool in tools.tools:
        name, parameters = tool_name(tool), tool_schema(tool)["function"]["parameters"]
        if name in tools.trial_calls:
            yield Finding("tools", "ok", f"{name} answers the recipe's `preflight`")
        else:
            required = {key: parameters["properties"][key] for key in parameters.get("required", [])}
            arguments = {key: MADE_UP.get(schema.get("type"), "1+1") for key, schema in required.items()}
            untried.append(ToolCall(name, arguments))
    with ToolRunner(tools.tools) as runner:
        runner.start("doctor", untried, context=ToolContext("doctor", 0, 0, training=False))
        [(_, results)] = runner.poll(None) if untried else [(None, [])]
    for call, result in zip(untried, results, strict=True):
        said = " ".join(str(result.content).split())[:120]
        how = f"{result.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        if result.failure is None:
            yield Finding("tools", "ok", f"{how} = {said!r} in {result.latency_s:.2f} s")
        elif result.failure == "tool_error":
            yield Finding(
                "tools",
                "warning",
                f"{how} failed with made-up arguments: {said}. Give it some that work as `preflight` in the recipe.",
            )
        else:
            yield Finding("tools", "problem", f"{how} failed ({result.failure}): {said}. Check what stands behind it.")


def _check_model(recipe: Recipe) -> Iterator[Finding]:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from trl import get_peft_config

    from ...demo.packaged_models import resolve_model
    from ...training.adapters import base_of, check_adapters_for_vllm, is_adapter, tokenizer_source

    name, model_args = recipe.model_args.model_name_or_path, recipe.model_args
    if name is None:
        raise ValueError("The recipe names no model: set `model_name_or_path`.")
    recipe.model = resolve_model(name, packaged=recipe.script_args.packaged_model)
    base, revision, trust = recipe.model, model_args.model_revision, recipe.args.trust_remote_code
    try:
        source, source_revision = tokenizer_source(recipe.model, revision)
        if is_adapter(recipe.model, revision):
            base, revision = base_of(recipe.model, revision)
        recipe.config = AutoConfig.from_pretrained(base, revision=revision, trust_remote_code=trust)
        recipe.tokenizer = AutoTokenizer.from_pretrained(source, revision=source_revision, trust_remote_code=trust)
    except OSError as error:
        raise OSError(
            f"The model {name} cannot be loaded: make it, or correct `model_name_or_path`. ({error})"
        ) from None
    stops = recipe.config.get_text_config().eos_token_id
    with contextlib.suppress(OSError):  # not every model has one
        stops = GenerationConfig.from_pretrained(base, revision=revision).eos_token_id or stops
    recipe.stop_token_ids = [stops] if isinstance(stops, int) else list(stops or [])
    if recipe.args.use_vllm and installed_version("peft") is not None:
        options = {"revision": model_args.model_revision, "trust_remote_code": trust}
        check_adapters_for_vllm(recipe.model, get_peft_config(model_args), options)
    yield Finding("model", "ok", f"{name} ({recipe.config.model_type})")


def _check_dialect(recipe: Recipe) -> Iterator[Finding]:
    from trl.chat_template_utils import is_chat_template_prefix_preserving

    from ...rollout.dialects import make_dialect

    tokenizer, args = recipe.tokenizer, recipe.args
    if tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template: set `chat_template_path`, or take a chat model.")
    tools = recipe.shown_tools
    dialect = make_dialect(args.dialect, tokenizer, tools, stop_token_ids=recipe.stop_token_ids)
    stops = ", ".join(repr(tokenizer.convert_ids_to_tokens(id)) for id in sorted(dialect.stop_token_ids))
    yield Finding("dialect", "ok", f"'{args.dialect}', turns end at {stops}")
    if args.dialect == "native" and tools and not is_chat_template_prefix_preserving(tokenizer):
        yield Finding(
            "dialect", "ok", "the template rewrites earlier turns; TRL's training version of it is used instead"
        )


def _check_rollout(recipe: Recipe) -> Iterator[Finding]:
    from ...rollout.dialects import DIALECTS
    from .trial import trial_rollout

    if recipe.args.dialect not in DIALECTS:
        yield Finding("rollout", "ok", f"not tried: the dialect {recipe.args.dialect} is your own")
        return
    tree = trial_rollout(recipe.tokenizer, recipe.args.dialect, recipe.stop_token_ids)
    forks = sum(row.parent is not None for row in tree.trajectories)
    yield Finding(
        "rollout",
        "ok",
        f"with a fake tool: {len(tree.trajectories)} rows, {forks} of them forks, each calls and answers",
    )


def _check_data(recipe: Recipe) -> Iterator[Finding]:
    from ...data.loading import load_prompts, render_prompts
    from ...rollout.environments import rehearse

    script_args = recipe.script_args
    source = recipe.dataset_args if recipe.dataset_args.datasets else script_args.dataset_name
    if source is None:
        raise ValueError("The recipe names no prompts: set `dataset_name` or `datasets`.")
    tools = recipe.shown_tools
    began = time.monotonic()
    prompts = load_prompts(
        source,
        script_args.dataset_train_split,
        name=script_args.dataset_config,
        dialect=recipe.args.dialect,
        tools=tools,
        system_prompt=script_args.system_prompt,
        tokenizer=recipe.tokenizer,
        max_prompt_length=script_args.max_prompt_length,
        limit=script_args.max_train_samples,
        num_examples=0,
    )
    recipe.num_prompts = len(prompts)
    message = f"{len(prompts)} prompts"
    if recipe.tokenizer is not None and recipe.tokenizer.chat_template is not None:
        texts = render_prompts(prompts, recipe.tokenizer, tools if recipe.args.dialect == "native" else ())
        lengths = [len(ids) for ids in recipe.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        recipe.longest_prompt = max(lengths)
        message += f", the longest has {recipe.longest_prompt} tokens"
    yield Finding("data", "ok", f"{message} (read in {time.monotonic() - began:.1f} s)")
    if recipe.environment_factory is not None:
        rehearse(recipe.environment_factory, prompts[0], recipe.args.branching)
    if unanswered := sum(not answers for answers in prompts["ground_truth"]):
        yield Finding(
            "data",
            "warning",
            f"{unanswered} of {len(prompts)} prompts have no accepted answer, and rewards that need one leave them "
            "out: give them an `answer`.",
        )
