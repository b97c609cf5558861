"""Stateful environments in training: every row ends with the state that its own calls make, forks included."""

import random
import threading
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.demo.tracks import Tracks, animals, hunts
from arpo_trl.rollout.environments import EnvironmentForkError, factory_tools, rehearse
from arpo_trl.tools.options import ToolOptions
from tests.scripted import ScriptedEngine, hashed
from tests.training_run import CPU_RUN
from tests.unit.test_demo_tracks import replay


class Copied(Tracks):
    """The same game without `fork`, so that it is copied."""

    fork = property()


def player(tokenizer, lands):
    """Plays at random: a call depends on the row, its path in the tree and the turn."""
    end = tokenizer.eos_token_id

    def turn(request):
        _, row, name, turns = request.id.split("/")
        rng = random.Random(hashed(row, name, turns))
        if int(turns) == 4:
            text = "done"
        elif rng.random() < 0.2:
            text = f'{{"name": "grab", "arguments": {{"animal": "{rng.choice(animals(lands[0]))}"}}}}'
        else:
            text = f'{{"name": "go", "arguments": {{"direction": "{rng.choice(["north", "south", "east"])}"}}}}'
        text = text if text == "done" else f"<tool_call>\n{text}\n</tool_call>"
        return [(token, rng.uniform(0.5, 5.0)) for token in [*tokenizer.encode(text), end]]

    return lambda request, sampled: turn(request)[len(sampled)]


def make_trainer(model_dir, tokenizer, folder, environment, reward_funcs, **options):
    games = list(hunts(6, seed=0))
    engine = ScriptedEngine(player(tokenizer, [game.land for game in games]))
    engine.stop_token_ids = frozenset([tokenizer.eos_token_id])

    def make_engine(self):
        self._tensor_parallel = None
        return engine

    args = ARPOConfig(
        output_dir=str(folder),
        **{
            "num_generations": 8,
            "num_initial_rollouts": 3,
            "per_device_train_batch_size": 16,
            "max_steps": 2,
            "max_completion_length": 1000,
            "entropy_window": 4,
            **CPU_RUN,
            **options,
        },
    )
    with patch.object(ARPOTrainer, "_make_engine", make_engine):
        return ARPOTrainer(
            AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
            reward_funcs,
            args,
            Dataset.from_list([game.row() for game in games]),
            eval_dataset=Dataset.from_list([games[0].row()]),
            processing_class=tokenizer,
            environment_factory=environment,
        )


@pytest.mark.parametrize("environment", [Tracks, Copied])
@pytest.mark.parametrize("order", ["eager", "ranked"])
def test_every_row_ends_in_the_state_that_its_calls_make(tiny_model_dir, tiny_tokenizer, tmp_path, environment, order):
    seen = []

    def as_replayed(completions, environments, land, quarry, rollout_info, **kwargs):
        for row in zip(completions, environments, land, quarry, rollout_info, strict=True):
            messages, game, row_land, row_quarry, info = row
            assert vars(game) == vars(replay(messages, row_land, row_quarry))
            seen.append((info["forked"], game))
        return [0.0] * len(completions)

    trainer = make_trainer(
        tiny_model_dir, tiny_tokenizer, tmp_path, environment, [as_replayed], fork_order=order, branch_alpha=0.9
    )
    trainer.train()
    assert len(seen) == 32 and len({id(game) for _, game in seen[-16:]}) == 16
    assert sum(forked for forked, _ in seen) >= 8
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [game.get_reward() for _, game in seen]
    assert logs[1][f"rewards/{environment.__name__}/mean"] == pytest.approx(sum(rewards[16:]) / 16)


def test_c10_c19_one_game_is_evaluated_and_its_prompt_shows_the_tools_but_fork(
    tiny_model_dir, tiny_tokenizer, tmp_path
):
    options = {"num_generations_eval": 1, "per_device_eval_batch_size": 1}
    trainer = make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, Tracks, [], **options)
    assert trainer.evaluate()["eval_rewards/Tracks/mean"] >= 0
    assert [len(tree.trajectories) for tree in trainer._trees] == [1]
    text = tiny_tokenizer.decode(next(iter(trainer._sampler.engine.requests.values())).prompt_ids)
    assert '"name": "go"' in text and '"name": "grab"' in text and "Walks one step." in text
    assert '"fork"' not in text and '"reset"' not in text and '"get_reward"' not in text
    row = trainer.eval_dataset[0]
    assert f"Catch the {row['quarry']}." + Tracks().reset(row["land"], row["quarry"]) + "<|im_end|>" in text


def test_an_environment_is_tried_before_a_model_is_loaded():
    class Locked(Tracks):
        def fork(self):
            raise TypeError("the server gives no second session")

    row = next(hunts(1, seed=0)).row()
    rehearse(Tracks, row, forks=True)
    rehearse({"game": Tracks}, {**row, "environment": "game"}, forks=True)
    rehearse(Locked, row, forks=False)
    with pytest.raises(EnvironmentForkError, match="Locked cannot be forked.*no second session"):
        rehearse(Locked, row, forks=True)
    with pytest.raises(ValueError, match="Tracks.reset cannot be called with the columns prompt: missing.*'land'"):
        rehearse(Tracks, {"prompt": row["prompt"]}, forks=True)
    with pytest.raises(ValueError, match="names the environment 'maze'.*has game"):
        rehearse({"game": Tracks}, {**row, "environment": "maze"}, forks=True)
    assert [tool.__name__ for tool in factory_tools({"one": Tracks, "two": Copied})] == ["go", "grab"]


def test_an_environment_with_a_call_that_was_given_up_is_replaced(tiny_model_dir, tiny_tokenizer, tmp_path):
    release, stuck, resets = threading.Event(), [], []

    class Stuck(Tracks):
        def reset(self, **columns):
            resets.append(self)
            return super().reset(**columns)

        def go(self, direction: Literal["north", "east", "south", "west"]) -> str:
            """Walks one step.

            Args:
                direction: Where to.
            """
            if not stuck:
                stuck.append(self)
                release.wait()
            return super().go(direction)

    scored = []

    def remember(completions, environments, rollout_info, **kwargs):
        scored.append(([info["infrastructure_failure"] for info in rollout_info], list(environments)))
        return [1.0] * len(completions)

    trainer = make_trainer(tiny_model_dir, tiny_tokenizer, tmp_path, Stuck, [remember])
    trainer._tool_runner._options["go"] = ToolOptions(timeout_s=0.3)
    trainer.train()
    release.set()
    broken, environments = scored[0]
    assert 1 <= sum(broken) < 16 and len({id(environment) for environment in environments}) == 16
    assert len(stuck) == 1 and all(environment is not stuck[0] for _, row in scored for environment in row)
    assert resets.count(stuck[0]) == 1 and not any(scored[1][0])
    assert trainer.state.log_history[0]["rollout/unscored_rows"] == sum(broken) / 16
