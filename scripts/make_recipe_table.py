"""Writes the tables of `recipes/README.md`: how each recipe is launched, and its memory and time by estimate.

```shell
python scripts/make_recipe_table.py
```

Memory is the doctor's estimate. Time is arithmetic on a GPU's bandwidth and speed, see `hours`. Nothing is loaded.
"""

import copy
import functools
import runpy
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from arpo_trl.commands.doctor.memory import ASLEEP, GIB, MemoryEstimate, ModelShape, estimate, model_shape
from arpo_trl.commands.doctor.resources import sizes_of
from arpo_trl.commands.launch import Launch, parse_recipe, read_launch


ROOT = Path(__file__).parents[1]
README = ROOT / "recipes" / "README.md"
# What the models' own config.json say about their shape.
MODELS: dict[str, PretrainedConfig] = {
    "Qwen2.5-3B-Instruct": Qwen2Config(
        vocab_size=151936, hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
    ),
    "Qwen2.5-7B-Instruct": Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=False,
    ),
    "Llama-3.1-8B-Instruct": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, tie_word_embeddings=False,
    ),
    "Qwen3-8B": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
    ),
    "Qwen3-14B": Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=False,
    ),
}  # fmt: skip
SHAPES = {name: model_shape(config) for name, config in MODELS.items()}
ROWS = {"ARPO-RL-Reasoning-10K": 10_000, "ARPO-RL-DeepSearch-1K": 1_000, "ARPO-SFT-54K": 54_000}


@dataclass(frozen=True)
class GPU:
    """Memory in GiB, bandwidth in bytes and dense bf16 speed in operations a second, as NVIDIA states them."""

    name: str
    memory: float
    bandwidth: float
    speed: float


H100 = GPU("80 GB (H100)", 79.6, 3.35e12, 989e12)
RTX4090 = GPU("24 GB (RTX 4090)", 24.0, 1.008e12, 165e12)


@dataclass
class Recipe:
    """A recipe of the folder, parsed as it would be launched."""

    path: Path
    script_args: object
    args: object
    model_args: object
    launch: Launch

    @property
    def algorithm(self) -> str:
        return self.path.parent.name

    @property
    def config(self) -> PretrainedConfig:
        return MODELS[self.path.parents[1].name]

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.path.parents[1].name]

    @property
    def gpu(self) -> GPU:
        return H100 if self.launch.num_processes > 1 else RTX4090

    @property
    def row_tokens(self) -> int:
        if self.algorithm == "sft":
            return self.args.max_length
        return self.script_args.max_prompt_length + self.args.max_completion_length


def gpu_recipes() -> list[Path]:
    """All recipes for GPUs, in the order of the table."""
    found = ROOT.glob("recipes/*/*/config_*.yaml")
    order = [*MODELS], ["sft", "arpo", "aepo"], ["full", "lora", "qlora"]
    keys = {path: (path.parents[1].name, path.parent.name, path.stem.removeprefix("config_")) for path in found}
    return sorted(keys, key=lambda path: [places.index(key) for places, key in zip(order, keys[path])])


@functools.cache
def read_recipe(path: Path, *options: str) -> Recipe:
    """Parses a recipe as for a dry run; `options` win over it."""
    script = runpy.run_path(str(ROOT / "scripts" / f"{path.parent.name}.py"))
    arguments = ["--config", str(path), "--dry_run", *options]
    script_args, args, model_args, _ = parse_recipe(script["make_parser"](), arguments)
    return Recipe(path, script_args, args, model_args, read_launch(script_args.accelerate_config))


def cache_bytes(config: PretrainedConfig) -> int:
    """Keys and values of one token in bf16."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2


def needed(recipe: Recipe) -> MemoryEstimate:
    return estimate(recipe.shape, recipe.args, recipe.model_args, recipe.row_tokens, recipe.launch)


def cached_rows(recipe: Recipe) -> tuple[int, float]:
    """Rows that one process samples, and GiB of their cache: vLLM's share, or rows of full length."""
    rows = recipe.args.per_device_train_batch_size * recipe.args.steps_per_generation
    if recipe.args.use_vllm:
        return rows, recipe.args.vllm_gpu_memory_utilization * recipe.gpu.memory - needed(recipe).engine
    return rows, rows * recipe.row_tokens * cache_bytes(recipe.config) / GIB


def peaks(recipe: Recipe) -> tuple[float, float]:
    """GiB of a GPU during a rollout and during an update; the former is 0 for SFT."""
    memory = needed(recipe)
    update = memory.total - memory.engine
    if recipe.algorithm == "sft":
        return 0.0, update
    _, cache = cached_rows(recipe)
    engine = memory.engine + cache
    if recipe.args.use_vllm:
        update += ASLEEP if recipe.args.vllm_enable_sleep_mode else engine
    return memory.weights + memory.optimizer + engine, update


def hours(recipe: Recipe) -> float:
    """
    Hours of the whole recipe.

    Rows are half as long as they may be. A token is sampled for all running rows at once, for which the weights and
    the rows' cache are read once, at half the GPU's bandwidth; the transformers engine takes 40 ms for that at least.
    A trained token takes 6 operations a parameter, 2 more where activations are computed anew and, in reinforcement
    learning, 2 for the old log-probabilities, at 40 % of the GPU's speed. Tools answer while other rows generate.
    """
    config, args, gpu, launch = recipe.config, recipe.args, recipe.gpu, recipe.launch
    parameters = recipe.shape.parameters
    examples = ROWS[recipe.script_args.dataset_name.split("/")[1]]
    operations = 6 + 2 * args.gradient_checkpointing
    if recipe.algorithm == "sft":
        # The papers' cut of 15,000 tokens is far above the usual trace.
        tokens = examples * args.num_train_epochs * 2_000
        return operations * parameters * tokens / (0.4 * gpu.speed * launch.num_processes) / 3600
    sizes = sizes_of(args, launch.num_processes)
    rollouts = args.num_train_epochs * (examples // sizes.prompts_per_rollout)
    if args.max_steps > 0:
        rollouts = args.max_steps / sizes.updates_per_rollout
    rows, cache = cached_rows(recipe)
    length = recipe.row_tokens / 2
    running = min(rows, int(cache * GIB / (length * cache_bytes(config))))
    read = needed(recipe).engine * GIB if args.use_vllm else needed(recipe).weights * GIB
    step = (read + running * length / 2 * cache_bytes(config)) / (0.5 * gpu.bandwidth)
    step = step if args.use_vllm else max(step, 0.04)
    sampling = rows / running * args.max_completion_length / 2 * step
    operations = operations * args.num_iterations + 2
    training = operations * parameters * rows * length / (0.4 * gpu.speed)
    return rollouts * (sampling + training) / 3600


def launch_line(recipe: Recipe) -> str:
    script = f"scripts/{recipe.algorithm}.py --config {recipe.path.relative_to(ROOT)}"
    config = recipe.script_args.accelerate_config
    return f"accelerate launch --config_file {config} {script}" if config else f"python {script}"


def render_recipes() -> str:
    lines = [
        "| recipe | GPUs | GiB a GPU: rollout, update | hours |",
        "|---|---|---|---|",
    ]
    for path in gpu_recipes():
        recipe = read_recipe(path)
        rollout, update = peaks(recipe)
        memory = f"{update:.0f}" if recipe.algorithm == "sft" else f"{rollout:.0f}, {update:.0f}"
        name = path.relative_to(ROOT / "recipes")
        time = hours(recipe)
        lines.append(
            f"| [{name.parent}/{name.stem.removeprefix('config_')}]({name}) | {recipe.launch.num_processes} × "
            f"{recipe.gpu.name} | {memory} | {time:.0f} |"
        )
    return "\n".join(lines)


def render_savings() -> str:
    """What the options that save memory do to one recipe, in GiB a GPU."""
    path = ROOT / "recipes/Qwen2.5-7B-Instruct/arpo/config_full.yaml"
    recipe = read_recipe(path)
    memory = needed(recipe)
    ddp = copy.copy(recipe)
    ddp.launch = Launch(recipe.launch.num_processes)
    zero2 = copy.copy(recipe)
    zero2.launch = Launch(recipe.launch.num_processes, sharding="zero2")

    def other(*options: str) -> MemoryEstimate:
        return needed(read_recipe(path, *options))

    tokens = min(recipe.args.max_packed_tokens, recipe.args.per_device_train_batch_size * recipe.row_tokens)
    logits = 2 * tokens * recipe.config.vocab_size * 4 / GIB
    state = memory.weights + memory.gradients + memory.optimizer

    def state_of(estimated: MemoryEstimate) -> float:
        return estimated.weights + estimated.gradients + estimated.optimizer

    adapter = ("--use_peft", "true", "--lora_r", "32", "--dtype", "bfloat16")
    lora, qlora = other(*adapter), other(*adapter, "--load_in_4bit", "true")
    rows = [
        ("`fsdp2.yaml` or `zero3.yaml` instead of `ddp.yaml`", "state", state_of(needed(ddp)), state),
        ("`zero2.yaml` instead of `ddp.yaml`", "state", state_of(needed(ddp)), state_of(needed(zero2))),
        ("`use_peft: true` (rank 32, bf16) on those 8 GPUs", "state", state, state_of(lora)),
        ("the same with `load_in_4bit: true`", "state", state, state_of(qlora)),
        ("`optim: adamw_8bit`", "optimizer", memory.optimizer, other("--optim", "adamw_8bit").optimizer),
        (
            "`gradient_checkpointing: true`",
            "activations",
            other("--gradient_checkpointing", "false").activations,
            memory.activations,
        ),
        (
            "half the `per_device_train_batch_size`",
            "activations",
            memory.activations,
            other("--per_device_train_batch_size", str(recipe.args.per_device_train_batch_size // 2)).activations,
        ),
        (
            "`token_micro_batches: true`",
            "activations",
            memory.activations,
            other("--token_micro_batches", "true").activations,
        ),
        ("TRL's fused LM head (always on)", "logits", logits, memory.lm_head),
        (
            "`vllm_enable_sleep_mode: true`",
            "vLLM during the update",
            recipe.args.vllm_gpu_memory_utilization * recipe.gpu.memory,
            ASLEEP,
        ),
    ]
    lines = [
        f"{path.parents[1].name}, {recipe.shape.parameters / 1e9:.2f}B parameters, `config_full.yaml`, GiB on each GPU:",
        "",
        "| option | of | without | with |",
        "|---|---|---|---|",
        *(f"| {option} | {part} | {before:.1f} | {after:.1f} |" for option, part, before, after in rows),
    ]
    return "\n".join(lines)


def render(page: str) -> str:
    """The page with its tables made anew, and the text around them as it was."""
    for name, table in (("recipes", render_recipes()), ("savings", render_savings())):
        mark = f"<!-- {name}: written by scripts/make_recipe_table.py -->\n"
        before, rest = page.split(mark)
        page = f"{before}{mark}\n{table}\n\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return page


if __name__ == "__main__":
    README.write_text(render(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {README}")
