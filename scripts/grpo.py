"""
Trains a tool-using model with GRPO: the prompts, tools, sampler and rewards of `scripts/arpo.py`, but no forks. All rows
of a prompt are independent, and every `loss_type` of TRL can be chosen. It is the baseline for ARPO and AEPO.

    python scripts/grpo.py --config recipes/cpu/grpo.yaml
"""

from arpo_trl.commands.errors import one_sentence_errors
from arpo_trl.commands.launch import parse_recipe
from arpo_trl.commands.recipe import ARPOScriptArguments
from arpo_trl.commands.train import train


def main(script_args, training_args, model_args, dataset_args):
    from arpo_trl import ARPOTrainer

    training_args.branching = False
    train(ARPOTrainer, script_args, training_args, model_args, dataset_args)


def make_parser(prog: str | None = None):
    from trl import DatasetMixtureConfig, ModelConfig, TrlParser

    from arpo_trl import ARPOConfig

    return TrlParser(
        (ARPOScriptArguments, ARPOConfig, ModelConfig, DatasetMixtureConfig), prog=prog, description=__doc__
    )


if __name__ == "__main__":
    with one_sentence_errors():
        arguments = parse_recipe(make_parser())
    main(*arguments)
