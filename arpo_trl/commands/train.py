"""What the training scripts do with a recipe: check it, or train, save and push."""

import sys
from contextlib import ExitStack

from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig

from ..training.memory_errors import memory_errors
from .errors import one_sentence_errors
from .recipe import ARPOScriptArguments, trainer_arguments


def train(
    trainer_class: type,
    script_args: ARPOScriptArguments,
    training_args: GRPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """Trains as a recipe says, saves the model, and pushes it where asked to; a dry run only checks the recipe.

    Args:
        trainer_class (`type`):
            [`ARPOTrainer`] or a subclass.
    """
    if script_args.dry_run:
        from .doctor.dry_run import dry_run

        algorithm = trainer_class._name if training_args.branching else "GRPO"
        sys.exit(dry_run(algorithm, script_args, training_args, model_args, dataset_args))
    with ExitStack() as closing:
        with one_sentence_errors(), memory_errors(training_args, model_args):
            recipe = script_args, training_args, model_args, dataset_args
            trainer = trainer_class(**trainer_arguments(*recipe, dialect=training_args.dialect, closing=closing))
        closing.callback(trainer.close_tools)
        with memory_errors(training_args, model_args):
            trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        finish(trainer, script_args, training_args)


def finish(trainer, script_args: ARPOScriptArguments, training_args: GRPOConfig) -> None:
    """Saves the trained model, its card and the log of its training, and pushes the model where the recipe says so."""
    from ..training.arpo_trainer import ARPOTrainer

    trainer.save_model(training_args.output_dir)
    trainer.save_state()
    trainer.accelerator.print(f"Model saved to {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
        trainer.accelerator.print(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}.")
    elif isinstance(trainer, ARPOTrainer):
        # For `arpo-trl push`, whenever that may be.
        trainer.create_model_card(dataset_name=script_args.dataset_name)
