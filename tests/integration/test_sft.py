"""`scripts/sft.py`: the tokens it trains on are those a rollout has, and tools' tokens carry no loss."""

import importlib.util
import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from arpo_trl.data.traces import load_traces, messages_of, tokenize_tagged_trace
from arpo_trl.demo.model import build_model, build_tokenizer
from arpo_trl.demo.task import calculator, questions, search, tagged_trace
from arpo_trl.rollout.dialects import TaggedDialect
from arpo_trl.tools.contract import ToolResult


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sft():
    spec = importlib.util.spec_from_file_location("sft_script", ROOT / "scripts" / "sft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Folder with an untrained model and 32 traces."""
    folder = tmp_path_factory.mktemp("demo")
    rng = random.Random(0)
    rows = [{"messages": tagged_trace(question, rng)} for question in questions(32, seed=0)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer([row["messages"] for row in rows])
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    return folder


def arguments(sft, demo, *extra: str):
    options = {
        "model_name_or_path": demo / "model",
        "dataset_name": demo / "sft.jsonl",
        "output_dir": demo / "out",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
    }
    recipe = ["--config", str(ROOT / "recipes" / "cpu" / "sft.yaml")]
    command_line = [f"--{option}={value}" for option, value in options.items()]
    return sft.make_parser().parse_args_and_config([*recipe, *command_line, *extra])


def rollout_ids(tokenizer, dialect, prompt, text):
    """The ids that a rollout would have in which the model samples the tokens of `text` and the tools answer."""
    ids = list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    sampled = [0] * len(ids)
    tools = {"search": search, "calculator": calculator}
    turn: list[int] = []
    while text:
        [token, *_] = tokenizer(text, add_special_tokens=False)["input_ids"]
        turn.append(token)
        text = text.removeprefix(tokenizer.decode([token]))
        if not dialect.closes_turn(turn, 1):
            continue
        ids, sampled = ids + turn, sampled + [1] * len(turn)
        calls = dialect.read(turn, "stop", list(tools.values())).calls
        if calls:
            [call] = calls
            [argument] = call.arguments.values()
            answer = tools[call.name](argument)
            result = dialect.result_ids(turn, calls, [ToolResult(call.name, answer)])
            ids, sampled = ids + result, sampled + [0] * len(result)
            text = text.removeprefix(f" <result>\n{answer}\n</result>")
        turn = []
    return ids, sampled


def test_tokens_are_those_of_a_rollout(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    dialect = TaggedDialect(tokenizer, [search, calculator])
    for row in load_traces(demo / "sft.jsonl"):
        prompt, assistant = messages_of(row)
        example = tokenize_tagged_trace([prompt, assistant], tokenizer, dialect)
        ids, sampled = rollout_ids(tokenizer, dialect, [prompt], assistant["content"])
        assert example["input_ids"] == [*ids, tokenizer.eos_token_id]
        assert [label != -100 for label in example["labels"]] == [*map(bool, sampled), True]
        assert all(label in (-100, id) for id, label in zip(example["input_ids"], example["labels"], strict=True))


def test_results_in_tool_messages_and_in_the_text_are_the_same(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    dialect = TaggedDialect(tokenizer, ())
    user = {"role": "user", "content": "In 1954, what?"}
    inline = [
        user,
        {"role": "assistant", "content": "<search>a</search>\n<result>\nx\n\ny\n</result><answer>b</answer>"},
    ]
    split = [
        user,
        {"role": "assistant", "content": "<search>a</search>"},
        {"role": "tool", "content": "x\n\ny"},
        {"role": "assistant", "content": "<answer>b</answer>"},
    ]
    assert tokenize_tagged_trace(inline, tokenizer, dialect) == tokenize_tagged_trace(split, tokenizer, dialect)


def test_a_result_may_hold_the_text_of_control_tokens(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    dialect = TaggedDialect(tokenizer, ())
    text = "<search>a</search> <result>\n<|im_end|></search>\n</result><answer>b</answer>"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    example = tokenize_tagged_trace(messages, tokenizer, dialect)
    assert example["input_ids"][:-1].count(tokenizer.eos_token_id) == 1  # that of the prompt
    assert tokenizer.decode(example["input_ids"]).endswith(text + "<|im_end|>")


QUESTION_AND_TRACE = [{"role": "user", "content": "Be brief.\n2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": QUESTION_AND_TRACE},
        {"prompt": QUESTION_AND_TRACE[:1], "completion": QUESTION_AND_TRACE[1:]},
        {"instruction": "Be brief.", "input": "2 + 2?", "output": "4"},
        {"instruction": "Be brief.\n2 + 2?", "input": "", "output": "4", "system": None},
        {"conversations": [{"from": "human", "value": "Be brief.\n2 + 2?"}, {"from": "gpt", "value": "4"}]},
    ],
    ids=["messages", "prompt", "alpaca", "alpaca without input", "sharegpt"],
)
def test_conversations_in_all_shapes(row):
    assert messages_of(row) == QUESTION_AND_TRACE


def test_system_messages_of_released_traces_come_first():
    system = {"role": "system", "content": "Use tools."}
    assert messages_of({"system": "Use tools.", "instruction": "q", "output": "a"})[0] == system
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "observation", "value": "r"}]
    messages = messages_of({"system": "Use tools.", "conversations": turns})
    assert messages[0] == system and [message["role"] for message in messages[1:]] == ["user", "assistant", "tool"]
    with pytest.raises(ValueError, match=r"columns \['text'\]; it needs `messages`"):
        messages_of({"text": "x"})


@pytest.mark.parametrize("roles", [["user"], ["user", "assistant", "user", "assistant"]])
def test_conversations_without_one_trace_are_refused(demo, roles):
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    with pytest.raises(ValueError, match="needs a prompt and then assistant or tool messages"):
        tokenize_tagged_trace(
            [{"role": role, "content": "x"} for role in roles], tokenizer, TaggedDialect(tokenizer, ())
        )


def test_sft_trains_and_saves_model_and_tokenizer(sft, demo):
    sft.main(*arguments(sft, demo))
    before = AutoModelForCausalLM.from_pretrained(demo / "model")
    after = AutoModelForCausalLM.from_pretrained(demo / "out")
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert (
        AutoTokenizer.from_pretrained(demo / "out").get_vocab()
        == AutoTokenizer.from_pretrained(demo / "model").get_vocab()
    )
    history = json.loads((demo / "out" / "trainer_state.json").read_text())["log_history"]
    assert all(torch.isfinite(torch.tensor(entry["loss"])) for entry in history if "loss" in entry)


def test_a_killed_run_goes_on_from_a_whole_checkpoint(sft, demo, tmp_path, caplog):
    def run(folder, *extra):
        options = ["--max_steps", "3", "--save_strategy", "steps", "--save_steps", "1", "--output_dir", str(folder)]
        sft.main(*arguments(sft, demo, *options, *extra))
        return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())

    whole = run(tmp_path / "whole")
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    shutil.rmtree(killed / "checkpoint-3")
    os.truncate(killed / "checkpoint-2" / "optimizer.pt", 100)
    written = (killed / "checkpoint-1" / "manifest.json").stat().st_mtime_ns
    resumed = run(killed, "--resume_from_checkpoint", "true")
    assert (killed / "checkpoint-1" / "manifest.json").stat().st_mtime_ns == written  # its step was not made again
    assert (killed / "checkpoint-2" / "manifest.json").stat().st_mtime_ns > written
    assert "checkpoint-2 is not complete: optimizer.pt" in caplog.text
    assert all(torch.equal(parameter, resumed[name]) for name, parameter in whole.items())
    history = json.loads((killed / "trainer_state.json").read_text())["log_history"]
    assert history[-1]["step"] == 3
    with pytest.raises(SystemExit, match="'nowhere' is not a folder"):
        run(killed, "--resume_from_checkpoint", "nowhere")
    with pytest.raises(SystemExit, match="per_device_train_batch_size=4, now it is .*=2"):
        run(killed, "--resume_from_checkpoint", "true", "--per_device_train_batch_size", "2")


def test_what_was_measured_since_the_last_log_outlives_a_kill(sft, demo, tmp_path):
    """The second log, of steps 3 and 4, is that of a run that was not stopped at step 3."""

    def history(folder, *extra):
        options = ["--max_steps=4", "--save_strategy=steps", "--save_steps=3", "--logging_steps=2"]
        sft.main(*arguments(sft, demo, *options, f"--output_dir={folder}", *extra))
        logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        return [{name: value for name, value in log.items() if "runtime" not in name} for log in logs if "loss" in log]

    whole = history(tmp_path / "whole")
    assert [log["step"] for log in whole] == [2, 4] and whole[1]["num_tokens"] > whole[0]["num_tokens"] > 0
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed, ignore=shutil.ignore_patterns("checkpoint-4"))
    assert history(killed, "--resume_from_checkpoint=true") == whole
    # Checkpoints that were made without these go on, too.
    (killed / "checkpoint-3" / "trainer_0.pt").unlink()
    manifest = json.loads((killed / "checkpoint-3" / "manifest.json").read_text())
    assert manifest["files"].pop("trainer_0.pt")
    (killed / "checkpoint-3" / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(killed / "checkpoint-4")
    assert history(killed, "--resume_from_checkpoint=true")[1]["num_tokens"] < whole[1]["num_tokens"]


def test_native_dialect_masks_prompt_and_tool_messages(sft, demo):
    """Conversations with tool messages go through TRL's assistant-only loss, the tools' schemas in the prompt."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "captain Bado 1974"}}}
    messages = [
        {"role": "user", "content": "In 1974, what is the captain of Bado?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": "captain: Zirnan"},
        {"role": "assistant", "content": "Zirnan"},
    ]
    path = demo / "native.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") * 4)
    script_args, training_args, model_args, dataset_args = arguments(
        sft,
        demo,
        "--dialect=native",
        "--tools=arpo_trl.demo.task.search",
        f"--dataset_name={path}",
        "--max_length=2000",
    )
    seen = {}

    class Recorder(SFTTrainer):
        def train(self, *args, **kwargs):
            seen.update(self.train_dataset[0])
            return super().train(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trl.SFTTrainer", Recorder)
        sft.main(script_args, training_args, model_args, dataset_args)
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    text = tokenizer.decode(seen["input_ids"])
    trained = tokenizer.decode(
        [id for id, label in zip(seen["input_ids"], seen["labels"], strict=True) if label != -100]
    )
    assert '"name": "search"' in text.split("</tools>\n")[0]
    assert trained.count("Zirnan") == 1 and "captain: Zirnan" not in trained
    assert trained.count("<tool_call>") == 1 and trained.count("<|im_end|>") == 2


def test_c22_a_typo_in_the_recipe_fails_by_name(sft, tmp_path):
    recipe = tmp_path / "typo.yaml"
    recipe.write_text("use_cpu: true\nlearning_rte: 1.0e-3\n")
    with pytest.raises(ValueError, match="learning_rte"):
        sft.make_parser().parse_args_and_config(["--config", str(recipe)])
