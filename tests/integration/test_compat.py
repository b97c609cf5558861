"""The contract with TRL and vLLM: what we touch of them is there. `make compat` runs this file on their newest releases."""

import operator

import pytest
from datasets import Dataset
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.training import trl_compat


@pytest.mark.parametrize("touched", [trl_compat.TOUCHED, trl_compat.TOUCHED_VLLM], ids=["trl", "vllm"])
def test_what_we_touch_is_there(touched):
    assert list(trl_compat.changed_members(touched)) == []


@pytest.mark.parametrize("path", trl_compat.VLLM_ATTRIBUTES)
def test_what_we_read_of_an_engine_is_there(vllm_llm, path):
    operator.attrgetter(path)(vllm_llm)


class Counter:
    """An environment with one tool."""

    def reset(self, **kwargs) -> None:
        self.count = 0

    def increment(self) -> int:
        """
        Counts up.

        Returns:
            The count.
        """
        self.count += 1
        return self.count


@pytest.fixture(scope="session")
def trainer(tiny_model_dir, tmp_path_factory):
    def reward(completions, **kwargs):
        return [0.0] * len(completions)

    args = ARPOConfig(
        output_dir=str(tmp_path_factory.mktemp("compat")),
        use_vllm=True,
        vllm_max_model_length=256,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    questions = Dataset.from_list([{"prompt": [{"role": "user", "content": "a"}]}])
    # Newer releases are not supported yet; here they are to show what they changed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trl_compat, "SUPPORTED", (Version("1.16"), Version("99")))
        patch.setattr(trl_compat, "SUPPORTED_VLLM", SpecifierSet(">=0.31"))
        return ARPOTrainer(tiny_model_dir, reward, args, train_dataset=questions, environment_factory=Counter)


@pytest.mark.parametrize("name", trl_compat.ATTRIBUTES)
def test_what_we_read_of_a_trainer_is_there(trainer, name):
    operator.attrgetter(name)(trainer)


def test_the_installed_versions_are_supported():
    trl_compat.check_trl()
    trl_compat.check_vllm()


def test_a_changed_trl_is_named(monkeypatch):
    members = {"trl.trainer.grpo_trainer": {"GRPOTrainer._gone": (), "GRPOTrainer._generate": ("self", "batch")}}
    monkeypatch.setattr(trl_compat, "TOUCHED", members)
    with pytest.raises(
        ImportError, match=r"_gone is gone.*_generate takes \(self, prompts\).*pip install trl==1.16.0"
    ):
        trl_compat.check_trl()


def test_a_module_that_moved_is_named():
    assert list(trl_compat.changed_members({"trl.moved": {"anything": ()}})) == [
        "trl.moved is gone (No module named 'trl.moved')"
    ]
