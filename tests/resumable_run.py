"""A training run that may kill itself at a chosen moment, and what came of it.

python tests/resumable_run.py MODEL_DIR OUTPUT_DIR OPTIONS [DEATH]

OPTIONS and DEATH are JSON: arguments of `ARPOConfig`, and `{"during": …, "step": …}` with one of

- `"rollout"`: a tool is running;
- `"update"`: gradients are there, the optimizer has not stepped;
- a file of a checkpoint: half of it is written;
- `"deleting"`: an old checkpoint has lost its first file.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import TrainerCallback, modeling_utils

from arpo_trl.training import checkpoints
from tests import small_models
from tests.sharding import assert_as_asked
from tests.training_run import make_trainer


TIMES = re.compile(r"(_s|time|runtime|per_second|flos)$")


def make(model_dir, output_dir, options, **arguments):
    """Two updates on each rollout, a checkpoint after each, almost two epochs; a log after every other update."""
    options = dict(options)
    defaults = {
        "deterministic_rollouts": True,
        "num_iterations": 2,
        "max_steps": 7,
        "max_completion_length": 32,
        "logging_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "branch_alpha": 0.7,
    }
    if options.pop("lora", False):
        arguments["peft_config"] = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return make_trainer(model_dir, output_dir, {**defaults, **options}, num_prompts=4, **arguments)


def result(trainer) -> dict:
    """Weights and logs; times left out."""
    assert_as_asked(trainer)
    digest, norm = hashlib.sha256(), 0.0
    for parameter in trainer.model.parameters():
        tensor = (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach()
        digest.update(tensor.numpy().tobytes())
        norm += tensor.double().norm().item() ** 2
    logs = [{k: v for k, v in entry.items() if not TIMES.search(k)} for entry in trainer.state.log_history]
    rank = trainer.accelerator.process_index
    return {"rank": rank, "weights": digest.hexdigest(), "norm": norm**0.5, "logs": logs}


def kill(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(TrainerCallback):
    def __init__(self, during: str, step: int, rank: int = 0):
        self.during, self.step, self.now = during, step, 0
        self.active = int(os.environ.get("RANK", 0)) == rank
        save, replace, rmtree, save_file = torch.save, Path.replace, shutil.rmtree, modeling_utils.safe_save_file

        def save_half_model(tensors, path, *args, **kwargs):
            save_file(tensors, path, *args, **kwargs)
            if self.in_checkpoint(path):
                os.truncate(path, os.path.getsize(path) // 2)
                kill()

        def save_half(obj, f, *args, **kwargs):
            save(obj, f, *args, **kwargs)
            if self.in_checkpoint(f):
                os.truncate(f, os.path.getsize(f) // 2)
                kill()

        def replace_never(path, target):
            if self.in_checkpoint(target):
                kill()
            return replace(path, target)

        def delete_one_file(path, *args, **kwargs):
            if self.active and during == "deleting" and self.now == step and Path(path).is_dir():
                sorted(Path(path).iterdir())[0].unlink()
                kill()
            return rmtree(path, *args, **kwargs)

        modeling_utils.safe_save_file = save_half_model
        torch.save, Path.replace, checkpoints.shutil.rmtree = save_half, replace_never, delete_one_file

    def in_checkpoint(self, path) -> bool:
        return self.active and Path(path).name == self.during and Path(path).parent.name == f"checkpoint-{self.step}"

    def search(self, query: str) -> str:
        if self.active and self.during == "rollout" and self.now >= self.step:
            kill()
        return small_models.search(query)

    search.__doc__ = small_models.search.__doc__

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.active and self.during == "update" and state.global_step == self.step:
            kill()

    def on_step_end(self, args, state, control, **kwargs):
        self.now = state.global_step


if __name__ == "__main__":
    model_dir, output_dir, options, *death = sys.argv[1:]
    options = json.loads(options)
    resume = options.pop("resume", None)
    arguments = {}
    if death:
        killer = Killer(**json.loads(death[0]))
        arguments = {"tools": [killer.search], "callbacks": [killer]}
    trainer = make(model_dir, output_dir, options, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    print("RESULT " + json.dumps(result(trainer)), flush=True)
