"""
Trains a tool-using model with AEPO: ARPO with entropy-balanced rollouts and updates.

One process:

    python scripts/aepo.py --config recipes/cpu/aepo.yaml

Several:

    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml scripts/aepo.py \\
        --config recipes/Qwen2.5-7B-Instruct/aepo/config_full.yaml

Every key of a recipe is an option, and an option on the command line wins: to leave one of AEPO's four parts out, add
`--dynamic_budget false`, `--branch_penalty false`, `--entropy_balanced_clipping false` or
`--entropy_aware_advantage false`.
"""

from arpo_trl.commands.errors import one_sentence_errors
from arpo_trl.commands.launch import parse_recipe
from arpo_trl.commands.recipe import ARPOScriptArguments
from arpo_trl.commands.train import train


def main(script_args, training_args, model_args, dataset_args):
    from arpo_trl import AEPOTrainer

    train(AEPOTrainer, script_args, training_args, model_args, dataset_args)


def make_parser(prog: str | None = None):
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from arpo_trl import AEPOConfig

    return TrlParser(
        (ARPOScriptArguments, AEPOConfig, ModelConfig, DatasetMixtureConfig), prog=prog, description=__doc__
    )


if __name__ == "__main__":
    with one_sentence_errors():
        arguments = parse_recipe(make_parser())
    main(*arguments)
