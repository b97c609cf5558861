"""Trains two steps with every logger at once and prints what wandb holds, in a process that the loggers may configure."""

import json
import sys
from unittest.mock import patch

import wandb

from arpo_trl import ARPOConfig, ARPOTrainer
from tests import scripted_training


def main(model_dir: str, folder: str) -> None:
    # TRL logs timings while it generates, which the loggers do not take before training has begun.
    with patch.object(ARPOTrainer, "_generate_and_score_completions"):
        trainer, _ = scripted_training.build(
            *(ARPOTrainer, ARPOConfig, model_dir, folder),
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            num_iterations=1,
            report_to=["wandb", "trackio", "tensorboard"],
            log_completions=True,
            project="arpo",
            run_name="run",
        )
    trainer.train()
    held = {name: value for name, value in dict(wandb.run.summary).items() if isinstance(value, int | float)}
    table = dict(wandb.run.summary)["completions"]
    print("HELD " + json.dumps({"metrics": held, "table": table["path"], "files": wandb.run.dir}))


if __name__ == "__main__":
    main(*sys.argv[1:])
