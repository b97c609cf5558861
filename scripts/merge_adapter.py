"""
Merges an adapter into its base model, as a model that transformers and vLLM load without PEFT.

    python scripts/merge_adapter.py runs/demo/arpo_lora runs/demo/arpo_merged

The adapter is a run's output folder, one of its checkpoints, or a name on the Hub; it names its base model itself. The
result has the data type in which the base model was saved; an adapter that was trained on a quantized base (QLoRA) is
merged into the unquantized one.
"""

import argparse

from arpo_trl.commands.errors import one_sentence_errors
from arpo_trl.training.adapters import base_of, merge_adapter


def main(args: argparse.Namespace) -> None:
    model = merge_adapter(args.adapter, args.output_dir)
    print(
        f"{args.adapter} merged into {base_of(args.adapter)[0]}: {model.num_parameters():,} parameters in "
        f"{str(model.dtype).removeprefix('torch.')}, saved to {args.output_dir}."
    )


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", help="folder of the adapter, or its name on the Hub")
    parser.add_argument("output_dir", help="folder for the merged model")
    return parser


if __name__ == "__main__":
    with one_sentence_errors():
        main(make_parser().parse_args())
