"""
Trains a tool-using model with GRPO: the prompts, tools, sampler and rewards of `scripts/arpo.py`, but no forks. All rows
of a prompt are independent, and every `loss_type` of TRL can be chosen. It is the baseline for ARPO and AEPO.

    python scripts/grpo.py --config recipes/cpu/grpo.yaml
"""

from arpo_trl.recipe import ARPOScriptArguments, finish, one_sentence_errors, trainer_arguments


def main(script_args, training_args, model_args, dataset_args):
    from arpo_trl import ARPOTrainer

    with one_sentence_errors():
        training_args.branching = False
        trainer = ARPOTrainer(
            **trainer_arguments(script_args, training_args, model_args, dataset_args, dialect=training_args.dialect)
        )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    finish(trainer, script_args, training_args)


def make_parser(prog: str | None = None):
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from arpo_trl import ARPOConfig

    return TrlParser(
        (ARPOScriptArguments, ARPOConfig, ModelConfig, DatasetMixtureConfig), prog=prog, description=__doc__
    )


if __name__ == "__main__":
    with one_sentence_errors():
        arguments = make_parser().parse_args_and_config()
    main(*arguments)
