"""
Trains a tool-using model with AEPO: ARPO with entropy-balanced rollouts and updates.

One process:

    python scripts/aepo.py --config recipes/cpu/aepo.yaml

Several:

    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml scripts/aepo.py \\
        --config recipes/Qwen2.5-7B/aepo/config_full.yaml

Every key of a recipe is an option, and an option on the command line wins: to leave one of AEPO's four parts out, add
`--dynamic_budget false`, `--branch_penalty false`, `--entropy_balanced_clipping false` or
`--entropy_aware_advantage false`.
"""

from arpo_trl.recipe import ARPOScriptArguments, finish, one_sentence_errors, trainer_arguments


def main(script_args, training_args, model_args, dataset_args):
    from arpo_trl import AEPOTrainer

    with one_sentence_errors():
        trainer = AEPOTrainer(
            **trainer_arguments(script_args, training_args, model_args, dataset_args, dialect=training_args.dialect)
        )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    finish(trainer, script_args, training_args)


def make_parser(prog: str | None = None):
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from arpo_trl import AEPOConfig

    return TrlParser(
        (ARPOScriptArguments, AEPOConfig, ModelConfig, DatasetMixtureConfig), prog=prog, description=__doc__
    )


if __name__ == "__main__":
    with one_sentence_errors():
        arguments = make_parser().parse_args_and_config()
    main(*arguments)
