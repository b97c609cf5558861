"""Runs two updates on the small tagged model and prints what came of it, a JSON line a process.

python tests/training_run.py MODEL_DIR OUTPUT_DIR '{"num_generations": 8, ...}'
"""

import json
import sys

from datasets import Dataset

from arpo_trl import ARPOConfig, ARPOTrainer
from tests.sharding import assert_as_asked, shard_on_cpu
from tests.small_models import WORDS, count_words, search


# A short run on a CPU that writes nothing.
CPU_RUN = {
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": "none",
    "logging_steps": 1,
    "disable_tqdm": True,
}


def make_trainer(
    model_dir: str, output_dir: str, options: dict, more_rewards=(), num_prompts=64, **arguments
) -> ARPOTrainer:
    defaults = {
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "use_vllm": True,
        "vllm_max_model_length": 256,
        "vllm_importance_sampling_mode": "token_truncate",
        "max_completion_length": 64,
        "entropy_window": 4,
        "dialect": "tagged",
        **CPU_RUN,
        "loss_type": "dapo",
    }
    prompts = [f"{first} {second}" for first in WORDS for second in WORDS][:num_prompts]
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    args = ARPOConfig(output_dir=output_dir, **{**defaults, **options})
    if args.fsdp:
        shard_on_cpu(args)
    return ARPOTrainer(
        model_dir,
        [count_words, *more_rewards],
        args,
        Dataset.from_list(rows),
        **{"tools": [search], **arguments},
    )


def summary(trainer: ARPOTrainer) -> dict:
    """What the last rollout and the run as a whole brought."""
    assert_as_asked(trainer)
    rows = [
        {"name": t.name, "ids": row.ids, "mask": row.mask, "finish_reason": t.finish_reason}
        for tree in trainer._trees
        for t, row in zip(tree.trajectories, tree.rows(0), strict=True)
    ]
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    weights = sum(
        (p.full_tensor() if hasattr(p, "full_tensor") else p).double().norm().item()
        for p in trainer.model.parameters()
    )
    return {
        "rank": trainer.accelerator.process_index,
        "rows": rows,
        "logs": logs,
        "weights": weights,
        "longest_chain_s": trainer._sampler.longest_chain_s,
    }


if __name__ == "__main__":
    model_dir, output_dir, options = sys.argv[1:4]
    trainer = make_trainer(model_dir, output_dir, json.loads(options))
    trainer.train()
    print("RESULT " + json.dumps(summary(trainer)), flush=True)
