"""
Trains a tool-using model with ARPO.

One process:

    python scripts/arpo.py --config recipes/cpu/arpo.yaml

Several:

    accelerate launch --config_file recipes/accelerate_configs/fsdp2.yaml scripts/arpo.py \\
        --config recipes/Qwen2.5-7B-Instruct/arpo/config_full.yaml

Every key of a recipe is an option, and an option on the command line wins: to train on prompts of your own, add
`--dataset_name my_questions.parquet` (or a JSONL file, a folder, a name on the Hub) with columns `prompt` or `question`
and `answer`.
"""

from arpo_trl.commands.errors import one_sentence_errors
from arpo_trl.commands.launch import parse_recipe
from arpo_trl.commands.recipe import ARPOScriptArguments
from arpo_trl.commands.train import train


def main(script_args, training_args, model_args, dataset_args):
    from arpo_trl import ARPOTrainer

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
