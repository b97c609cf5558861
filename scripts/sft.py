"""
Cold-starts a model on recorded tool use, before reinforcement learning. Tokens that came from tools are masked.

    python scripts/sft.py --config recipes/cpu/sft.yaml

Rows have a column `messages` (or `prompt` and `completion`). With `dialect: tagged` the assistant's message holds the
whole trace, `<search>…</search> <result>…</result> … <answer>…</answer>`, as in the papers' released data; with
`dialect: native` calls and results are messages of their own, with `tool_calls` and the role `tool`, and the schemas of
the `tools` and of the environment that the recipe names stand in every prompt unless a row has `tools` of its own.
"""

import sys
from dataclasses import dataclass, field

from arpo_trl.commands.errors import one_sentence_errors
from arpo_trl.commands.launch import parse_recipe
from arpo_trl.commands.recipe import RecipeArguments
from arpo_trl.commands.train import finish
from arpo_trl.training.memory_errors import memory_errors


@dataclass
class SFTScriptArguments(RecipeArguments):
    """
    Arguments beside those of the trainer and the model.

    Args:
        dialect (`str`, *optional*, defaults to `"native"`):
            How tool calls look, `"native"` or `"tagged"`.
        tools (`list`, *optional*):
            Native dialect only: names or dotted paths of the tools whose schemas stand in the prompts.
        environment_factory (`str`, *optional*):
            Native dialect only: dotted path of a TRL environment factory, whose tools stand there too.
        max_train_samples (`int`, *optional*):
            Train on the first so many rows.
    """

    dialect: str = field(
        default="native",
        metadata={
            "help": "How tool calls look: 'native' (chat template) or 'tagged' (ARPO's tags).",
            "choices": ["native", "tagged"],
        },
    )
    tools: list[str] = field(
        default_factory=list,
        metadata={"help": "Native dialect: names or dotted paths of the tools whose schemas stand in the prompts."},
    )
    environment_factory: str | None = field(
        default=None, metadata={"help": "Native dialect: dotted path of an environment factory with more tools."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many rows."})


def prepare(dataset, script_args, tokenizer):
    """Brings rows into what `SFTTrainer` takes: token ids with labels (tagged), or messages with tools (native)."""
    import json

    from arpo_trl.data.columns import dataset_of
    from arpo_trl.data.reading import named_row
    from arpo_trl.data.traces import conversations, tokenize_tagged_trace
    from arpo_trl.extensions import load_object
    from arpo_trl.rollout.dialects import TaggedDialect
    from arpo_trl.rollout.environments import factory_tools
    from arpo_trl.tools.calling import tool_schema
    from arpo_trl.tools.registry import resolve_tools

    if script_args.dialect == "tagged":
        dialect = TaggedDialect(tokenizer, tools=())
        examples = []
        for number, messages in enumerate(conversations(dataset), 1):
            with named_row(f"Row {number}"):
                examples.append(tokenize_tagged_trace(messages, tokenizer, dialect))
        return dataset_of({column: [example[column] for example in examples] for column in ("input_ids", "labels")})
    with resolve_tools(script_args.tools) as tools:
        schemas = tools.schemas()
    if script_args.environment_factory:
        schemas += [tool_schema(tool) for tool in factory_tools(load_object(script_args.environment_factory))]
    own = dataset["tools"] if "tools" in dataset.column_names else [None] * len(dataset)
    texts = [row if isinstance(row, str) and row else json.dumps(row or schemas) for row in own]
    return dataset_of({"messages": list(conversations(dataset)), "tools": texts})


def main(script_args, training_args, model_args, dataset_args):
    from transformers import AutoTokenizer
    from trl import SFTTrainer, get_peft_config, get_quantization_config

    from arpo_trl.data.traces import load_traces
    from arpo_trl.training.checkpoints import CheckpointMixin, find_checkpoint
    from arpo_trl.training.sharding import ShardingMixin

    class Trainer(CheckpointMixin, ShardingMixin, SFTTrainer):
        """Goes on where it was killed, sharded where that is asked for."""

    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }
    with one_sentence_errors(), memory_errors(training_args, model_args):
        training_args.resume_from_checkpoint = find_checkpoint(training_args.resume_from_checkpoint, training_args)
        tokenizer = AutoTokenizer.from_pretrained(
            model_args.model_name_or_path,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        )
        source = dataset_args if dataset_args.datasets else script_args.dataset_name
        splits = {"train": script_args.dataset_train_split}
        if training_args.eval_strategy != "no":
            splits["test"] = script_args.dataset_test_split
        datasets = {name: load_traces(source, script_args.dataset_config, split) for name, split in splits.items()}
        if script_args.max_train_samples is not None:
            datasets["train"] = datasets["train"].take(script_args.max_train_samples)
        datasets = {name: prepare(dataset, script_args, tokenizer) for name, dataset in datasets.items()}
        if script_args.dry_run:
            from arpo_trl.commands.doctor.dry_run import dry_run_sft

            sys.exit(dry_run_sft(script_args, training_args, model_args, datasets["train"]))
        # Tagged rows carry their labels already.
        training_args.assistant_only_loss = script_args.dialect == "native"
        trainer = Trainer(
            model=model_args.model_name_or_path,
            args=training_args,
            train_dataset=datasets["train"],
            eval_dataset=datasets.get("test"),
            processing_class=tokenizer,
            quantization_config=get_quantization_config(model_args),
            peft_config=get_peft_config(model_args),
        )
    with memory_errors(training_args, model_args):
        trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    finish(trainer, script_args, training_args)


def make_parser(prog: str | None = None):
    from trl import DatasetMixtureConfig, ModelConfig, SFTConfig, TrlParser

    return TrlParser(
        (SFTScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig), prog=prog, description=__doc__
    )


if __name__ == "__main__":
    with one_sentence_errors():
        arguments = parse_recipe(make_parser())
    main(*arguments)
