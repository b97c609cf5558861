"""ARPOTrainer end to end on a small random model that calls tools."""

import asyncio

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.rewards import resolve_rewards
from arpo_trl.tools.contract import InfrastructureError, ToolContext
from tests.small_models import count_words, save_tagged_model, search
from tests.training_run import CPU_RUN, make_trainer, summary


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tagged_model(tmp_path_factory.mktemp("tagged_model"))


def check_rows(trainer) -> None:
    """The batch is what the trees hold: M rows a prompt, masks of sampled tokens, at least one token."""
    for tree in trainer._trees:
        assert len(tree.trajectories) == trainer.num_generations
        assert len({id(t.tail) for t in tree.trajectories}) == trainer.num_generations
        for row in tree.rows(0):
            assert len(row.ids) == len(row.mask) == len(row.logprobs) >= 1


def test_same_seed_same_rows(model_dir, tmp_path, monkeypatch):
    """With `deterministic_rollouts` two runs with one seed give the same rows, forks and rewards, with real vLLM."""
    options = {"deterministic_rollouts": True, "max_steps": 2}
    runs = []
    for number in range(2):
        trainer = make_trainer(model_dir, str(tmp_path / str(number)), options)
        pushes, push = [], trainer.vllm_generation.sync_weights
        monkeypatch.setattr(trainer.vllm_generation, "sync_weights", lambda p=push, s=pushes: s.append(True) or p())
        trainer.train()
        assert len(pushes) == 2  # once a step
        check_rows(trainer)
        runs.append(summary(trainer))
    first, second = runs
    assert any("." in row["name"] for row in first["rows"])
    assert first["rows"] == second["rows"]
    # Threads add up gradients in any order, so that the last digits of weights may differ.
    assert first["weights"] == pytest.approx(second["weights"], rel=1e-6)
    for key in ("reward", "rollout/forks", "rollout/tool_calls"):
        assert [entry[key] for entry in first["logs"]] == [entry[key] for entry in second["logs"]]
    # C15: the engine has the trained weights after a step with a learning rate of 1e-2.
    assert first["logs"][1]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=0.02)
    assert first["logs"][1]["sampling/sampling_logp_difference/max"] < 1e-4


async def slow_search(query: str) -> str:
    """Looks something up.

    Args:
        query: What.
    """
    await asyncio.sleep(0)
    return query


slow_search.__name__ = "search"


def second_reward(completions, rollout_info, **kwargs):
    """`None` for some rows, and a look at what the trainer says of them."""
    assert all(info["finish_reason"] in ("stop", "length", "tool_limit") for info in rollout_info)
    return [None if info["tool_turns"] else 1.0 for info in rollout_info]


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"loss_type": "grpo", "mask_truncated_completions": True}, {}),
        ({"beta": 0.1, "num_iterations": 2, "max_steps": 3}, {}),
        ({"attribution": "hard", "gradient_accumulation_steps": 2}, {}),
        ({"branching": False}, {"tools": [slow_search]}),
        ({"fork_order": "ranked", "branch_factor": 2, "num_initial_rollouts": 2}, {}),
        ({"reward_weights": [1.0, 0.5], "deterministic_rollouts": True}, {"more_rewards": [second_reward]}),
    ],
)
def test_what_grpo_takes_arpo_takes(model_dir, tmp_path, options, arguments):
    trainer = make_trainer(model_dir, str(tmp_path), {"use_vllm": False, "max_steps": 1, **options}, **arguments)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    check_rows(trainer)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert all(entry["grad_norm"] == entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry)


def test_an_entropy_reward_compares_the_same_tokens_of_all_rows(model_dir, tmp_path):
    (bonus,) = resolve_rewards(["entropy_bonus_reward"], {"entropy_bonus_reward": {"coefficient": 0.5}})
    trainer = make_trainer(model_dir, str(tmp_path), {"use_vllm": False, "max_steps": 1}, more_rewards=[bonus])
    trainer.train()
    for tree in trainer._trees:
        for segment in tree.segments():
            assert len(segment.entropies) == (min(4, len(segment.ids)) if segment.sampled else 0)
        assert any(not trajectory.can_fork for trajectory in tree.trajectories)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 1e39])
def test_an_infinite_reward_is_refused_by_name_and_row(model_dir, tmp_path, value):
    def unbounded(completions, **kwargs):
        return [None, 1.0, value, *[0.0] * (len(completions) - 3)]

    trainer = make_trainer(model_dir, str(tmp_path), {"use_vllm": False}, more_rewards=[unbounded])
    with pytest.raises(ValueError, match=r"'unbounded' gave -?inf for row 2 of this rollout; let it give a finite"):
        trainer.train()


def test_lora(model_dir, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    options = {"use_vllm": False, "max_steps": 1, "beta": 0.1}
    trainer = make_trainer(model_dir, str(tmp_path), options, peft_config=config)
    trainer.train()
    check_rows(trainer)
    assert any("lora_B" in name and parameter.abs().sum() > 0 for name, parameter in trainer.model.named_parameters())


def test_c19_evaluation_of_single_rows(model_dir, tmp_path):
    """One sample a prompt, an odd number of prompts, no forks, other numbers than in training."""
    options = {"use_vllm": False, "num_generations_eval": 1, "per_device_eval_batch_size": 1}
    trainer = make_trainer(model_dir, str(tmp_path), options)
    rows = trainer.train_dataset.select(range(3))
    metrics = trainer.evaluate(rows)
    assert metrics["eval_reward"] >= 0
    assert len(trainer._trees) == 1 and len(trainer._trees[0].trajectories) == 1


def test_a_broken_backend_leaves_its_rows_out(model_dir, tmp_path):
    """C21: rows whose tool failed for reasons of its own have no reward; the loss stays finite. The tool is told the
    question of the prompt."""
    questions = {}

    def search(query: str, context: ToolContext) -> str:
        """Looks something up.

        Args:
            query: What.
        """
        questions.setdefault(context.row, set()).add(context.question)
        raise InfrastructureError("the backend is down")

    from arpo_trl.tools.options import ToolOptions

    arguments = {"tools": [search], "tool_options": {"search": ToolOptions(max_retries=0)}}
    trainer = make_trainer(model_dir, str(tmp_path), {"use_vllm": False, "max_steps": 1}, **arguments)
    trainer.train()
    log = trainer.state.log_history[0]
    failed = sum(
        r.failure == "infrastructure" for tree in trainer._trees for t in tree.trajectories for r in t.results()
    )
    assert failed > 0 and 0 < log["rollout/unscored_rows"] < 1
    prompts = {prompt[-1]["content"] for prompt in trainer.train_dataset["prompt"]}
    assert questions and all(len(asked) == 1 and asked <= prompts for asked in questions.values())
    assert log["loss"] == log["loss"] and log["grad_norm"] == log["grad_norm"]


def test_masking_truncated_rows_changes_no_count(model_dir, tmp_path):
    """Lengths and `num_tokens` are of what was sampled, as in TRL, which masks after it has counted."""
    counts = []
    for masked in (False, True):
        options = {"use_vllm": False, "max_steps": 1, "max_completion_length": 12, "deterministic_rollouts": True}
        trainer = make_trainer(model_dir, str(tmp_path), {**options, "mask_truncated_completions": masked})
        trainer.train()
        log = trainer.state.log_history[0]
        counts.append({name: log[name] for name in log if name.startswith("completions/") or name == "num_tokens"})
        assert any(not any(row.mask) for row in trainer._rows) == masked
    assert counts[0] == counts[1] and 0 < counts[0]["completions/clipped_ratio"] < 1
    assert counts[0]["completions/min_length"] >= 1


def answer_length(completions, **kwargs):
    """Reads the last message without a look at whether there is one, as most rewards do."""
    return [float(len(completion[-1]["content"])) for completion in completions]


async def late_search(query: str) -> str:
    """Looks something up.

    Args:
        query: What.
    """
    await asyncio.sleep(20)
    return query


late_search.__name__ = "search"


@pytest.mark.parametrize("case", ["no room", "no time"])
def test_rows_that_never_began_do_not_end_the_run(model_dir, tmp_path, case):
    options = {"use_vllm": False, "max_steps": 1}
    if case == "no time":
        options |= {"rollout_timeout": 1.5, "num_initial_rollouts": 4, "seed": 5}
    trainer = make_trainer(
        model_dir,
        str(tmp_path),
        options,
        tools=[search] if case == "no room" else [late_search],
        more_rewards=[answer_length],
    )
    if case == "no room":
        rows = [{"prompt": [{"role": "user", "content": " ".join(["w1"] * n)}]} for n in (600, 3, 600, 3)]
        trainer.train_dataset = Dataset.from_list(rows)
    trainer.train()
    never = [row for row, t in zip(trainer._rows, trainer._trajectories(), strict=True) if not t.sampled]
    assert 0 < len(never) < len(trainer._rows)
    assert all(row.messages == [{"role": "assistant", "content": ""}] for row in never)
    log = trainer.state.log_history[0]
    assert log["rollout/unscored_rows"] == log["rollout/empty_rows"] == len(never) / len(trainer._rows)
    assert log["loss"] == log["loss"] and log["grad_norm"] > 0


def test_what_grpo_is_given_by_position_and_asked_by_hand(model_dir, tmp_path):
    """Arguments in TRL's order, and rewards of rows that came from no rollout of ours."""
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "w1 w2"}]}] * 2)
    args = ARPOConfig(
        output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, branching=False, **CPU_RUN
    )
    tokenizer, callback = AutoTokenizer.from_pretrained(model_dir), TrainerCallback()
    trainer = ARPOTrainer(model_dir, count_words, args, rows, rows.select([0]), tokenizer, None, [callback])
    assert len(trainer.eval_dataset) == 1 and trainer.processing_class is tokenizer
    assert callback in trainer.callback_handler.callbacks
    completions = [[{"role": "assistant", "content": content}] for content in ("w1", "w1 w2 w3")]
    rewards = trainer._calculate_rewards(list(rows), rows["prompt"][:2], completions, [[4], [4, 5, 6]])
    assert rewards.flatten().tolist() == pytest.approx([0.1, 0.3])


def test_what_can_be_asked_before_training(model_dir, tmp_path):
    """Loaders, an evaluation and a checkpoint, in any trainer that `train` was not called on."""
    trainer = make_trainer(model_dir, str(tmp_path / "out"), {"use_vllm": False, "per_device_eval_batch_size": 8})
    assert len(trainer.get_train_dataloader()) == 64 * 8 // 16
    rows = trainer.train_dataset.select(range(2))
    assert len(trainer.get_eval_dataloader(rows)) == 2
    assert trainer.evaluate(rows)["eval_rollout/empty_rows"] == 0
    trainer.save_model(str(tmp_path / "saved"))
    trainer.create_model_card()
    assert (tmp_path / "out" / "README.md").is_file() and (tmp_path / "saved" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"tools": []}, "no tools"),
        ({}, {"rollout_func": print}, "rollout_func"),
        ({}, {"environment_factory": dict}, "native"),
        ({"vllm_mode": "server", "use_vllm": True}, {}, "vllm_mode"),
    ],
)
def test_what_cannot_go_together_is_refused_before_a_model_is_loaded(tmp_path, options, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_trainer("no/such/model", str(tmp_path), {"use_vllm": False, **options}, **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 6}, r"num_generations to one of \[2, 4, 8, 16\].*multiple of 3"),
        ({"num_initial_rollouts": 9}, "between 1 and num_generations"),
        ({"entropy_window": 0}, "at least 1 token"),
        ({"branch_alpha": 1.5}, "probability"),
        ({"branch_beta": float("nan")}, "finite"),
        ({"branch_rule": "sometimes"}, "'bernoulli', 'threshold'"),
        ({"dialect": "klingon"}, "'native', 'tagged'"),
        ({"temperature": 0.0}, "greedy"),
        ({"max_tool_calling_iterations": 0}, "at least 1"),
        ({"generation_kwargs": {"logprobs": 50}}, "must not set logprobs"),
        ({"branching": False, "attribution": "hard"}, "forks"),
        ({"rollout_timeout": 1e9}, "ddp_timeout"),
        ({"use_liger_kernel": True}, "use_kernels"),
        ({"token_micro_batches": True, "loss_type": "grpo"}, "set loss_type='dapo', or token_micro_batches=False"),
        ({"token_micro_batches": True, "prefix_sharing": "off"}, "prefix_sharing='on'"),
    ],
)
def test_c20_c23_bad_options_say_what_to_change(tmp_path, options, message):
    defaults = {"num_generations": 8, "per_device_train_batch_size": 16, "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match=message):
        ARPOConfig(output_dir=str(tmp_path), report_to="none", **{**defaults, **options})
