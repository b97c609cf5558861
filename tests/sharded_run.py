"""Trainings on scripted rows, alone or in two processes that shard the model; what came of each, by name.

torchrun --nproc_per_node 2 tests/sharded_run.py MODEL_DIR OUTPUT_DIR    # → OUTPUT_DIR/sharded.pt
"""

import collections
import sys

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from arpo_trl import AEPOConfig, AEPOTrainer, ARPOConfig, ARPOTrainer
from arpo_trl.training.adapters import merged_parameters
from arpo_trl.training.vllm_generation import ARPOVLLMGeneration
from tests.scripted_training import build, reward, search
from tests.sharding import FSDP2, assert_as_asked


RUNS = {
    "aepo": (
        AEPOTrainer,
        AEPOConfig,
        {"attribution": "hard", "beta": 0.1, "token_micro_batches": True, "max_packed_tokens": 150},
    ),
    "lora": (ARPOTrainer, ARPOConfig, {"beta": 0.1, "lora": True}),
    "bf16": (ARPOTrainer, ARPOConfig, {"bf16": True, "lora": True, "dtype": torch.bfloat16}),
}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of a tensor, which may be sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(name: str, model_dir: str, output_dir: str, pushes: int = 1, **options) -> dict:
    """Two updates, of two micro-batches in each process, on the rows of a script; then `pushes` pushes of weights."""
    trainer_class, config_class, own = RUNS[name]
    options = {
        "loss_type": "dapo",
        "max_steps": 2,
        "num_iterations": 1,
        "optim": "sgd",  # Adam would turn a rounding difference of a tiny gradient into a step of full length
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": name == "aepo",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **own,
        **options,
    }
    if options.pop("lora", False):
        options["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = build(trainer_class, config_class, model_dir, output_dir, generate=False, **options)
    assert trainer._prefix_sharing_enabled
    seen = watch(trainer)
    trainer.train()
    assert_as_asked(trainer)
    model, logs = trainer.model, [entry for entry in trainer.state.log_history if "loss" in entry]
    before = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for _ in range(pushes - 1):
        collections.deque(merged_parameters(model), maxlen=0)  # all of a push but the gathering, which takes longest
    pushed = push(trainer)
    worn = [name for name, value in model.named_parameters() if not torch.equal(whole(value), before[name])]
    with torch.no_grad():
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    return {
        **seen,
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "pushed": pushed,
        "worn": worn,
        "left_gathered": sum(not isinstance(parameter, DTensor) for parameter in model.parameters()),
        "pushed_after_a_pass": push(trainer),
    }


def push(trainer) -> dict[str, torch.Tensor]:
    """What a push of weights would give the engine."""
    generation = object.__new__(ARPOVLLMGeneration)
    generation.model, generation.accelerator, generation._dist = trainer.model, trainer.accelerator, trainer._dist
    return {name: values.clone() for name, values in generation._iter_named_params()}


def watch(trainer) -> dict:
    """Looks at log-probabilities as they are computed, and at gradients after each micro-batch."""
    seen = {"logps": [], "gradients_sharded": [], "gradient_types": set()}
    score, step = trainer._get_per_token_logps_and_entropies, trainer.training_step

    def watched_score(*args, **kwargs):
        scores = score(*args, **kwargs)
        seen["logps"].append(scores[0].detach().clone())
        return scores

    def watched_step(model, *args, **kwargs):
        loss = step(model, *args, **kwargs)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        seen["gradients_sharded"].append(all(isinstance(gradient, DTensor) for gradient in gradients))
        seen["gradient_types"] |= {gradient.dtype for gradient in gradients if gradient is not None}
        return loss

    trainer._get_per_token_logps_and_entropies, trainer.training_step = watched_score, watched_step
    return seen


def refusal(model_dir: str, output_dir: str) -> str:
    """What a run is told that asks for FSDP where accelerate does not shard."""
    args = ARPOConfig(output_dir, use_cpu=True, bf16=False, report_to=[], **FSDP2)
    try:
        ARPOTrainer(model_dir, reward, args, Dataset.from_dict({"prompt": ["a"]}), tools=[search])
    except ValueError as error:
        return str(error)


def main(model_dir: str, output_dir: str) -> None:
    results = {"refusal": refusal(model_dir, output_dir)}
    for name in RUNS:
        pushes = 100 if name == "bf16" else 1
        results[name] = run(name, model_dir, output_dir, pushes, micro_batch=2, processes=2, **FSDP2)
    if dist.get_rank() == 0:
        torch.save(results, f"{output_dir}/sharded.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
