"""Every recipe is what its scripts and launchers take: parsed, made, its sizes checked as on the GPUs that it is for."""

import contextlib
import functools
import itertools
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from arpo_trl.commands.doctor.read_recipe import algorithm_of
from arpo_trl.commands.doctor.resources import batch_sizes, sizes_of
from arpo_trl.commands.launch import Launch, current_launch, parse_recipe, read_launch
from arpo_trl.extensions import load_object
from arpo_trl.rewards.registry import resolve_rewards
from arpo_trl.tools.registry import resolve_tools
from arpo_trl.tools.search.local import Passage, build_index
from arpo_trl.training.prefix_sharing.trainer import why_not_exact


ROOT = Path(__file__).parents[2]
TABLE = runpy.run_path(str(ROOT / "scripts" / "make_recipe_table.py"))
GPU_RECIPES = TABLE["gpu_recipes"]()
CPU_RECIPES = sorted(path for path in ROOT.glob("recipes/cpu/*.yaml") if not path.stem.startswith("evaluate"))
RL_RECIPES = [
    path for path in [*GPU_RECIPES, *CPU_RECIPES] if "sft" not in (path.parent.name, path.stem.split("_")[0])
]
ACCELERATE_CONFIGS = sorted(ROOT.glob("recipes/accelerate_configs/*.yaml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes"))


def each(paths: list[Path]):
    return pytest.mark.parametrize("path", paths, ids=name_of)


def script_of(path: Path) -> str:
    """Name of the script a recipe is for: of the folder it lies in, under `cpu` the first word of its own."""
    return path.stem.split("_")[0] if path.parent.name == "cpu" else path.parent.name


@functools.cache
def parse(path: Path, *options: str):
    """A recipe's dataclasses as its launch would make them, on any machine."""
    script = runpy.run_path(str(ROOT / "scripts" / f"{script_of(path)}.py"))
    return parse_recipe(script["make_parser"](), ["--config", str(path), "--dry_run", *options])


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder like the repository's, with small indexes where recipes look for theirs."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for index in ("data/wiki_index", "runs/search_cache_index"):
        build_index(folder / index, [Passage("Paris is the capital of France.")], "a test", threads=1, memory_mb=15)
    return folder


@pytest.fixture(autouse=True)
def workplace(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "of a test")
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):  # recipes set them
        monkeypatch.setenv(name, os.environ.get(name, "1"))


def test_there_are_recipes_for_each_model_and_algorithm():
    found = {path.relative_to(ROOT / "recipes").as_posix() for path in GPU_RECIPES}
    for model, algorithm in itertools.product(TABLE["MODELS"], ("sft", "arpo", "aepo")):
        assert f"{model}/{algorithm}/config_full.yaml" in found
    for model, algorithm, kind in itertools.product(
        ("Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct"), ("arpo", "aepo"), ("lora", "qlora")
    ):
        assert f"{model}/{algorithm}/config_{kind}.yaml" in found
    everywhere = {path for path in ROOT.glob("recipes/**/*.yaml") if "accelerate_configs" not in path.parts}
    others = {path.name for path in everywhere - {*GPU_RECIPES, *CPU_RECIPES}}
    assert others == {"kubernetes_job.yaml", "evaluate_smollm2.yaml"}


@each([*GPU_RECIPES, *CPU_RECIPES])
def test_recipe_is_parsed_and_its_arguments_are_made(path):
    script_args, args, model_args, _ = parse(path)
    launch = read_launch(script_args.accelerate_config)
    assert args.world_size == 1  # outside of `arguments_of` it is this process again
    assert args.output_dir.startswith("runs/") and model_args.model_name_or_path
    if path in GPU_RECIPES:
        assert args.bf16 and args.gradient_checkpointing and launch.num_processes == (8 if "full" in path.stem else 1)
        # Without float32 weights an optimizer step of 1e-6 would be rounded away.
        assert model_args.use_peft or model_args.dtype == "float32"
        assert not (launch.sharding != "none" and not getattr(args, "use_vllm", True))


@each(RL_RECIPES)
def test_c20_sizes_divide_on_the_processes_that_the_recipe_is_for(path):
    script_args, args, _, _ = parse(path)
    processes = read_launch(script_args.accelerate_config).num_processes
    sizes = sizes_of(args, processes)
    assert sizes.rows_per_rollout == args.generation_batch_size == sizes.prompts_per_rollout * args.num_generations
    assert sizes.rows_per_update % args.num_generations == 0 or path.parent.name == "cpu"
    if args.use_vllm and args.vllm_max_model_length is not None and script_args.max_prompt_length is not None:
        assert script_args.max_prompt_length + args.max_completion_length <= args.vllm_max_model_length


PUBLISHED = {  # prompts a rollout and an update, rows, roots, prompt and response tokens, tool calls, epochs
    "Qwen2.5-3B-Instruct": (128, 16, 16, 8, 1536, 4096, 3, 2),
    "Qwen2.5-7B-Instruct": (128, 16, 16, 8, 1536, 4096, 3, 2),
    "Llama-3.1-8B-Instruct": (128, 16, 16, 8, 1536, 4096, 3, 2),
    "Qwen3-8B": (128, 16, 16, 8, 2000, 10000, 6, 5),
    "Qwen3-14B": (64, 8, 12, 6, 2000, 6192, 6, 5),
}


@each([path for path in RL_RECIPES if path.stem == "config_full"])
def test_recipes_for_all_weights_have_the_published_settings(path):
    script_args, args, _, _ = parse(path)
    prompts, mini_batch, rows, roots, prompt, completion, calls, epochs = PUBLISHED[path.parents[1].name]
    sizes = sizes_of(args, read_launch(script_args.accelerate_config).num_processes)
    assert (sizes.prompts_per_rollout, sizes.rows_per_update) == (prompts, mini_batch * rows)
    assert (args.num_generations, args.num_initial_rollouts) == (rows, roots)
    assert (script_args.max_prompt_length, args.max_completion_length) == (prompt, completion)
    assert (args.max_tool_calling_iterations, args.num_train_epochs) == (calls, epochs)
    assert (args.learning_rate, args.lr_scheduler_type, args.beta, args.temperature) == (1e-6, "constant", 0, 1)
    assert (args.branch_alpha, args.branch_beta, args.entropy_window, args.epsilon) == (0.5, 0.2, 20, 0.2)
    assert args.max_packed_tokens == 2 * (prompt + completion) and args.vllm_importance_sampling_mode.startswith(
        "token"
    )
    if path.parent.name == "aepo":
        assert args.dynamic_budget and args.branch_penalty and args.entropy_balanced_clipping
        assert (args.budget_beta, args.branch_gamma, args.entropy_advantage_scale) == (0.5, 0.05, 0.2)


@each([path for path in RL_RECIPES if "lora" in path.stem])
def test_lora_recipes_share_prefixes(path):
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import get_peft_config

    _, args, model_args, _ = parse(path)
    assert model_args.load_in_4bit == ("qlora" in path.stem) and args.prefix_sharing == "auto"
    peft_config = get_peft_config(model_args)
    assert isinstance(peft_config, LoraConfig) and peft_config.target_modules == "all-linear"
    tiny = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    assert why_not_exact(get_peft_model(Qwen2ForCausalLM(tiny), peft_config).train()) is None


@each([path for path in RL_RECIPES if path.parent.name == "aepo" and "full" not in path.stem])
def test_aepo_has_ratios_to_clip(path):
    script_args, args, _, _ = parse(path)
    assert sizes_of(args, read_launch(script_args.accelerate_config).num_processes).updates_per_rollout > 1


@each([*RL_RECIPES, *(path for path in CPU_RECIPES if script_of(path) == "sft")])
def test_rewards_tools_and_environments_of_a_recipe_can_be_made(path):
    script_args = parse(path)[0]
    environment = load_object(script_args.environment_factory) if script_args.environment_factory else None
    with contextlib.closing(resolve_tools(script_args.tools)) as tools:
        assert len(tools.schemas()) == len(tools.tools)
    if path in RL_RECIPES:
        assert resolve_rewards(script_args.reward_funcs, script_args.reward_kwargs) or environment is not None
        assert tools.tools or environment is not None


@each([*GPU_RECIPES, *CPU_RECIPES])
def test_c22_typo_fails_and_the_command_line_wins(path, tmp_path):
    _, args, _, _ = parse(path, "--learning_rate", "0.125", "--seed", "7")
    assert (args.learning_rate, args.seed) == (0.125, 7)
    text = path.read_text()
    wrong = tmp_path / path.parent.name / path.name  # the folder names the script
    wrong.parent.mkdir(exist_ok=True)
    wrong.write_text(text.replace("\nlearning_rate:", "\nlerning_rate:"))
    with pytest.raises(ValueError, match="lerning_rate"):
        parse(wrong)


@each([*GPU_RECIPES, *CPU_RECIPES])
def test_launch_line_in_the_recipe_is_the_recipe_s_own(path):
    comment = path.read_text().split("\n\n")[0].replace("# ", "").replace("\\\n", " ")
    commands = re.findall(r"^ *(?:accelerate launch|python) .*scripts/\w+\.py +--config .*$", comment, re.MULTILINE)
    own = [shlex.split(command) for command in commands if str(path.relative_to(ROOT)) in command]
    assert own, "the comment at the top names no launch line"
    script_args = parse(path)[0]
    for words in own:
        assert f"scripts/{script_of(path)}.py" in words
    launched = own[0][own[0].index("--config_file") + 1] if own[0][0] == "accelerate" else None
    assert launched == script_args.accelerate_config


@pytest.mark.parametrize("path", [*ROOT.glob("scripts/*.py"), ROOT / "README.md", ROOT / "recipes" / "README.md"])
def test_recipes_that_are_named_exist(path):
    for name in re.findall(r"(?<![\w/.])recipes/[\w./-]+\.(?:yaml|slurm|md)", path.read_text()):
        assert (ROOT / name).exists(), name


@each(GPU_RECIPES)
def test_memory_fits_the_gpu_by_estimate(path):
    recipe = TABLE["read_recipe"](path)
    assert max(TABLE["peaks"](recipe)) < recipe.gpu.memory - 1.5  # CUDA itself


def test_table_in_the_readme_is_up_to_date():
    page = (ROOT / "recipes" / "README.md").read_text()
    assert page == TABLE["render"](page), "run `python scripts/make_recipe_table.py`"
    assert all(f"({name_of(path)})" in page for path in GPU_RECIPES)
    assert TABLE["render"](re.sub(r"^\|.*\n", "", page, flags=re.MULTILINE)).count("\n## ") == page.count("\n## ") == 5


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Qwen2.5-3B-Instruct", 3.09),
        ("Qwen2.5-7B-Instruct", 7.62),
        ("Llama-3.1-8B-Instruct", 8.03),
        ("Qwen3-8B", 8.19),
        ("Qwen3-14B", 14.77),
    ],
)
def test_models_of_the_table_have_the_published_number_of_parameters(model, billions):
    assert TABLE["SHAPES"][model].parameters / 1e9 == pytest.approx(billions, abs=0.006)


# What a recipe is launched with


def launch_environment(command: list[str]) -> tuple:
    """Arguments and environment that `accelerate launch` would start its processes with."""
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if not args.use_deepspeed:
        return args, prepare_multi_gpu_env(args)
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as `launch_command` does
    return args, prepare_deepspeed_cmd_env(args)[1]


@each(ACCELERATE_CONFIGS)
def test_accelerate_takes_its_configs(path):
    kind, _, nodes = path.stem.partition("_")
    launch = read_launch(path)
    assert launch.num_machines == (2 if nodes == "multi_node" else 1)
    assert launch.num_processes == 8 * launch.num_machines
    assert launch.sharding == {"ddp": "none", "fsdp2": "fsdp"}.get(kind, kind)
    args, environment = launch_environment(
        ["--config_file", str(path), "--machine_rank", "0", "--main_process_ip", "10.0.0.1", "train.py"]
    )
    content = yaml.safe_load(path.read_text())
    known = set(vars(launch_command_parser().parse_args(["train.py"])))
    unknown = {*content.get("fsdp_config", {}), *content.get("deepspeed_config", {})} - known
    assert not unknown, f"accelerate knows no {unknown}"
    assert args.num_processes == launch.num_processes and args.mixed_precision == "bf16"
    with patch_environment(**environment):
        if kind == "fsdp2":
            plugin = FullyShardedDataParallelPlugin()
            assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is True
            assert plugin.state_dict_type.name == "FULL_STATE_DICT" and plugin.cpu_ram_efficient_loading
        elif kind != "ddp":
            plugin = DeepSpeedPlugin()
            stage = plugin.deepspeed_config["zero_optimization"]["stage"]
            assert f"zero{stage}" == kind and plugin.zero3_init_flag == (stage == 3)


def test_accelerate_config_with_a_typo_or_of_another_kind_is_refused(tmp_path):
    text = (ROOT / "recipes/accelerate_configs/zero2.yaml").read_text()
    cases = {
        "num_procceses": ("num_processes:", "num_procceses:"),
        "zero_stage 1": ("zero_stage: 2", "zero_stage: 1"),
        "distributed_type": ("DEEPSPEED", "MEGATRON_LM"),
    }
    for message, (right, wrong) in cases.items():
        path = tmp_path / "config.yaml"
        path.write_text(text.replace(right, wrong))
        with pytest.raises(ValueError, match=message):
            read_launch(path)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml"):
        read_launch("nowhere.yaml")


def test_slurm_script_starts_one_launcher_a_node(tmp_path):
    stubs = tmp_path / "bin"
    stubs.mkdir()
    programs = {
        "scontrol": "for i in {7..5000}; do echo node$i; done",  # a reader that stops early would break the pipe
        # As srun: the command on each node, with its number.
        "srun": 'while [[ $1 == --* ]]; do shift; done; for i in 0 1; do SLURM_PROCID=$i "$@"; done',
        "accelerate": 'printf "%s\\0" "$@" >> "$CALLS"; printf "\\n" >> "$CALLS"',
    }
    for name, body in programs.items():
        (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
        (stubs / name).chmod(0o755)
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NODELIST": "node[7-8]"}
    job |= {"SLURM_JOB_ID": "12345", "CALLS": str(tmp_path / "calls"), "PATH": f"{stubs}:{os.environ['PATH']}"}
    recipe = "recipes/Qwen3-14B/arpo/config_full.yaml"
    script = ["bash", str(ROOT / "recipes/launch.slurm")]
    subprocess.run([*script, "fsdp2", "arpo", recipe, "--seed", "1 2"], env=job, check=True, timeout=60)
    calls = [line.rstrip("\0").split("\0") for line in (tmp_path / "calls").read_text().splitlines()]
    for rank, (launch, *command) in enumerate(calls):
        assert launch == "launch"
        args, _ = launch_environment(command)
        assert (args.machine_rank, args.num_machines, args.num_processes) == (rank, 2, 8)
        assert (args.main_process_ip, args.main_process_port, args.use_fsdp) == ("node7", 32345, True)
        assert args.training_script == "scripts/arpo.py"
        assert args.training_script_args == ["--config", recipe, "--seed", "1 2"]
    assert len(calls) == 2
    refused = subprocess.run([*script, "fsdp2"], env=job, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and refused.stderr.startswith("usage:")


def test_kubernetes_job_launches_its_recipe_on_both_nodes():
    service, job = yaml.safe_load_all((ROOT / "recipes/kubernetes_job.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert job["kind"] == "Job" and spec["completionMode"] == "Indexed"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    program, launch, *command = container["command"]
    assert (program, launch) == ("accelerate", "launch") and all(isinstance(word, str) for word in command)
    args, _ = launch_environment([word.replace("$(JOB_COMPLETION_INDEX)", "1") for word in command])
    assert args.num_machines == spec["completions"] == spec["parallelism"]
    assert args.main_process_ip == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert args.num_processes == gpus * args.num_machines
    assert args.training_script == "scripts/arpo.py"
    options = ["--accelerate_config", args.config_file, "--dry_run"]
    script = runpy.run_path(str(ROOT / "scripts/arpo.py"))
    parsed = parse_recipe(script["make_parser"](), [*args.training_script_args, *options])[1]
    recipe = ROOT / args.training_script_args[args.training_script_args.index("--config") + 1]
    assert sizes_of(parsed, args.num_processes) == sizes_of(parse(recipe)[1], 8)  # more nodes, the same batches


# Sizes


def test_c20_batch_sizes_of_so_many_processes():
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "num_generations": 16}
    sizes = batch_sizes(8, steps_per_generation=64, **options)
    assert (sizes.prompts_per_rollout, sizes.rows_per_rollout) == (128, 2048)
    assert (sizes.rows_per_update, sizes.updates_per_rollout) == (256, 8)
    assert batch_sizes(8, generation_batch_size=2048, **options) == sizes
    assert batch_sizes(8, **options).prompts_per_rollout == 16
    assert batch_sizes(8, steps_per_generation=64, num_iterations=2, **options).updates_per_rollout == 16


def test_c20_sizes_that_do_not_divide_name_those_that_do():
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_generations": 16}
    with pytest.raises(ValueError, match=r"Set num_generations to one of \[2, 3, 4, 6, 12\]"):
        batch_sizes(8, **options)
    with pytest.raises(ValueError, match="set it to 2048"):
        batch_sizes(8, generation_batch_size=2050, **options)
    with pytest.raises(ValueError, match=r"set it to one of \[1, 2, 4, 8\]"):
        batch_sizes(8, steps_per_generation=64, vllm_tensor_parallel_size=3, **options)


def test_arguments_are_those_of_the_named_launch(tmp_path):
    recipe = tmp_path / "arpo.yaml"
    (tmp_path / "mine.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\n")
    recipe.write_text(
        yaml.safe_dump(
            {
                "accelerate_config": "recipes/accelerate_configs/fsdp2.yaml",
                "per_device_train_batch_size": 4,
                "num_generations": 8,
                "generation_batch_size": 64,
                "eval_strategy": "steps",
                "per_device_eval_batch_size": 1,
                "output_dir": "runs/x",
            }
        )
    )
    parser = runpy.run_path(str(ROOT / "scripts/arpo.py"))["make_parser"]
    arguments = ["--config", str(recipe), "--dry_run"]
    _, args, _, _ = parse_recipe(parser(), arguments)  # neither 64 rows nor 8 evaluated ones would do for 1 process
    assert args.steps_per_generation == 2
    with pytest.raises(ValueError, match="eval batch size"):
        parse_recipe(parser(), [*arguments, "--num_generations_eval", "3"])
    with pytest.raises(ValueError, match=r"global batch size \(4\)"):  # the command line wins here, too
        parse_recipe(
            parser(), [*arguments, "--accelerate_config", str(tmp_path / "mine.yaml"), "--generation_batch_size", "6"]
        )


def test_what_was_launched_wins_over_the_config(monkeypatch):
    path = "recipes/accelerate_configs/fsdp2.yaml"
    assert current_launch(path) == Launch(8, 1, "fsdp")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert current_launch(path) == Launch(4, 1, "fsdp")


def test_a_launch_in_words():
    assert str(Launch()) == "1 process" and str(Launch(8)) == "8 processes (DDP)"
    assert str(Launch(16, 2, "zero3")) == "16 processes on 2 machines (zero3)"


def test_algorithm_is_the_last_one_that_a_path_names():
    assert algorithm_of("/work/arpo_trl/recipes/Qwen3-8B/aepo/config_full.yaml") == "aepo"
    assert algorithm_of("recipes/cpu/grpo.yaml") == "grpo" and algorithm_of("/arpo/mine.yaml") == "arpo"
    assert algorithm_of("mine.yaml") == "arpo"
