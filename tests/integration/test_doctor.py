"""`arpo-trl doctor`: a sound recipe passes, each fault is a sentence that says what to do, exit codes are for scripts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from packaging.version import Version
from transformers import AutoConfig

from arpo_trl.commands.cli import main
from arpo_trl.commands.doctor import installation, memory
from arpo_trl.commands.doctor.findings import ALTERNATIVES
from arpo_trl.commands.doctor.trial import RESULT, trial_rollout
from arpo_trl.commands.launch import Launch
from arpo_trl.tools.contract import InfrastructureError


ROOT = Path(__file__).parents[2]


def lookup(query: str) -> str:
    """Looks something up.

    Args:
        query: What.
    """
    return f"about {query}"


def broken(query: str) -> str:
    """Asks a backend that is down.

    Args:
        query: What.
    """
    raise InfrastructureError("the backend at 127.0.0.1:9 refuses connections")


def picky(number: str) -> str:
    """Wants a number of four digits.

    Args:
        number: Which.
    """
    if not re.fullmatch(r"\d{4}", number):
        raise ValueError("not a number of four digits")
    return "found"


@pytest.fixture
def write(tiny_model_dir, tmp_path, monkeypatch):
    """Writes a sound recipe, changed as asked, and returns its path."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.syspath_prepend(str(ROOT))
    data = tmp_path / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"question": f"What is {n} + {n}?", "answer": str(2 * n)}) + "\n" for n in range(8))
    )

    def write(**changes):
        recipe = {
            "model_name_or_path": tiny_model_dir,
            "dataset_name": str(data),
            "system_prompt": "none",
            "tools": ["tests.integration.test_doctor.lookup"],
            "reward_funcs": ["exact_match_reward"],
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 40,
            "max_tool_result_length": 16,
            "output_dir": str(tmp_path / "out"),
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
        }
        path = tmp_path / "arpo.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in {**recipe, **changes}.items() if v is not None}))
        return str(path)

    return write


@pytest.fixture
def diagnose(capsys):
    """Exit status and findings."""

    def run(*arguments):
        status = main(["doctor", "--json", *arguments])
        answer = json.loads(capsys.readouterr().out)
        assert answer["ok"] == (status == 0)
        return status, answer["findings"]

    return run


def test_a_sound_recipe_passes(write, diagnose):
    status, findings = diagnose("--config", write())
    assert status == 0 and {finding["status"] for finding in findings} == {"ok"}, [
        f["message"] for f in findings if f["status"] != "ok"
    ]
    checks = {finding["check"]: finding["message"] for finding in findings}
    assert set(checks) == set(
        "versions device recipe packages rewards tools model dialect rollout data sizes memory".split()
    )
    assert checks["tools"].startswith("lookup(query='1+1') = 'about 1+1'")
    assert "4 rows, 2 of them forks" in checks["rollout"]
    assert "2 prompts × 4 rows" in checks["sizes"] and "8 prompts" in checks["data"]


FAULTS = {
    "unknown_key": ({"num_generatoins": 4}, "recipe", "num_generatoins"),
    "c20_sizes": ({"num_generations": 3}, "recipe", "Set num_generations to one of"),
    "gpu_recipe": ({"bf16": True, "use_cpu": False}, "recipe", "set bf16: false"),
    "no_tools": ({"tools": None}, "tools", "set `tools`, or branching: false"),
    "c08_dead_backend": ({"tools": ["tests.integration.test_doctor.broken"]}, "tools", "refuses connections"),
    "no_such_tool": ({"tools": ["serach"]}, "tools", "Unknown tool 'serach'"),
    "no_such_reward": ({"reward_funcs": ["exact"]}, "rewards", "exact"),
    "no_model": ({"model_name_or_path": "nowhere/model"}, "model", "correct `model_name_or_path`"),
    "no_file": ({"dataset_name": "nowhere.jsonl"}, "data", "check the path"),
    "c11_long_prompts": ({"max_prompt_length": 2}, "data", "raise `max_prompt_length`"),
    "wandb_key": ({"report_to": "wandb"}, "accounts", "wandb login"),
    "hub_token": ({"push_to_hub": True}, "accounts", "hf auth login"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_problem_that_says_what_to_do(fault, write, diagnose, monkeypatch):
    changes, check, remedy = FAULTS[fault]
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    if fault == "gpu_recipe" and torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, findings = diagnose("--config", write(**changes))
    problems = [finding for finding in findings if finding["status"] == "problem"]
    assert status == 1 and [finding["check"] for finding in problems] == [check], findings
    assert remedy in problems[0]["message"] and "\n" not in problems[0]["message"]


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("13.0", r"built for CUDA 13.0, which needs a newer driver \(CUDA 13 needs 580 or newer\): see nvidia-smi"),
        ("12.8", "built for CUDA 12.8, which needs a newer driver: see nvidia-smi"),
        (None, "has no CUDA: make install LOCK=requirements-gpu.lock"),
    ],
)
def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch, cuda, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(installation.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    [finding] = installation.check_device()
    assert finding.status == "problem" and re.search(message, finding.message)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    [finding] = installation.check_device()
    assert finding.status == "ok"


def test_a_gpu_without_a_compiler_is_a_warning(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="A GPU", total_memory=2**30)
    )
    assert [finding.status for finding in installation.check_device()] == ["ok", "warning"]


def test_a_gpu_recipe_is_examined_all_the_same(write, diagnose):
    _, findings = diagnose("--config", write(bf16=True, use_cpu=False))
    assert {"memory", "rollout", "data"} <= {finding["check"] for finding in findings}


def test_a_dataset_without_the_columns(write, diagnose, tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text('{"colour": "red"}\n')
    status, findings = diagnose("--config", write(dataset_name=str(path)))
    [problem] = [finding for finding in findings if finding["status"] == "problem"]
    assert status == 1 and problem["check"] == "data" and "prompt" in problem["message"]
    path.write_text('{"question": "x"}\n')
    status, findings = diagnose("--config", write(dataset_name=str(path)))
    [warning] = [finding for finding in findings if finding["status"] == "warning"]
    assert status == 0 and "1 of 1 prompts have no accepted answer" in warning["message"]


def test_a_template_without_tools(write, diagnose, tiny_tokenizer, tiny_model, tmp_path):
    folder = tmp_path / "model"
    tiny_model.save_pretrained(folder)
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tiny_tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(plain)
    status, findings = diagnose("--config", write(model_name_or_path=str(folder)))
    problems = {finding["check"]: finding["message"] for finding in findings if finding["status"] == "problem"}
    assert status == 1 and "dialect 'tagged'" in problems["dialect"]
    status, _ = diagnose("--config", write(model_name_or_path=str(folder)), "--dialect", "tagged")
    assert status == 0


def test_made_up_arguments_that_a_tool_refuses_are_no_problem(write, diagnose):
    path = "tests.integration.test_doctor.picky"
    status, findings = diagnose("--config", write(tools=[path]))
    [finding] = [finding for finding in findings if finding["check"] == "tools"]
    assert status == 0 and finding["status"] == "warning" and "`preflight`" in finding["message"]
    status, findings = diagnose("--config", write(tools=[{"path": path, "preflight": {"number": "1234"}}]))
    [finding] = [finding for finding in findings if finding["check"] == "tools"]
    assert status == 0 and finding["status"] == "ok"
    status, findings = diagnose("--config", write(tools=[{"path": path, "preflight": {"number": "12"}}]))
    assert status == 1


def test_rows_that_cannot_fit_are_warned_about(write, diagnose):
    status, findings = diagnose("--config", write(max_completion_length=500, max_tool_result_length=500))
    warnings = [finding["message"] for finding in findings if finding["status"] == "warning"]
    assert status == 0 and len(warnings) == 2
    assert "max_completion_length (500) do not fit" in warnings[0] and "max_tool_result_length (500)" in warnings[1]


def test_packages_that_a_recipe_needs(write, diagnose, monkeypatch):
    found = installation.installed_version
    monkeypatch.setattr(
        "arpo_trl.commands.doctor.recipe.installed_version", lambda name: None if name == "vllm" else found(name)
    )
    status, findings = diagnose("--config", write(use_vllm=True))
    [problem] = [finding for finding in findings if finding["status"] == "problem"]
    assert status == 1 and 'pip install "arpo-trl[vllm]"' in problem["message"]


def test_other_versions_than_the_tested_or_allowed(diagnose, monkeypatch):
    versions = {"vllm": "0.30.1", "torch": "2.12.0"}
    found = installation.installed_version
    monkeypatch.setattr(
        installation,
        "installed_version",
        lambda name: Version(versions[name]) if name in versions else found(name),
    )
    status, findings = diagnose()
    [problem] = [finding["message"] for finding in findings if finding["status"] == "problem"]
    [warning] = [finding["message"] for finding in findings if finding["status"] == "warning"]
    assert status == 1 and 'pip install "vllm==0.31.*"' in problem and "torch 2.12.0 (tested: 2.13.0)" in warning


@pytest.mark.parametrize("lock", ["requirements-cpu.lock", "requirements-gpu.lock"])
def test_tested_versions_are_the_locked_ones(lock):
    pins = dict(re.findall(r"^([a-z-]+)==([\d.]+)", (ROOT / lock).read_text(), re.MULTILINE))
    for name, version in installation.TESTED.items():
        assert version in {pins.get(other) for other in ALTERNATIVES.get(name, (name,))}, name


def test_usage(capsys, write):
    assert main(["doctor", "--config", "nowhere.yaml"]) == 1
    assert "There is no recipe nowhere.yaml" in capsys.readouterr().out
    for wrong in ([], ["view"], ["view", "folder", "--nonsense"], ["doctor", "--algorithm", "ppo"]):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
    capsys.readouterr()
    assert main(["doctor", "--config", write(), "--algorithm", "aepo"]) == 0
    out = capsys.readouterr().out
    assert "AEPO" in out and out.splitlines()[-1] == "0 problems, 0 warnings"


@pytest.mark.parametrize("dialect", ["native", "tagged"])
def test_trial_rollout(dialect, tiny_tokenizer):
    tree = trial_rollout(tiny_tokenizer, dialect, [])
    assert [row.parent is None for row in tree.trajectories] == [True, True, False, False]
    assert all(RESULT in tiny_tokenizer.decode(tree.prefix_ids(row)) for row in tree.trajectories)


def test_memory_estimate(tiny_model_dir, tiny_model, write):
    from arpo_trl.commands.doctor.read_recipe import _parse

    def needed(launch=None, **changes):
        recipe = _parse(write(**{"prefix_sharing": "off", "dtype": "float32", **changes}), "arpo", [])
        return memory.estimate(shape, recipe.args, recipe.model_args, row_tokens=100, launch=launch)

    shape = memory.model_shape(AutoConfig.from_pretrained(tiny_model_dir))
    assert shape.parameters == sum(parameter.numel() for parameter in tiny_model.parameters())
    assert shape.embeddings == 320 * 64  # tied
    size = shape.parameters * 4 / 2**30
    full = needed(gradient_checkpointing=False)
    assert (full.weights, full.gradients, full.optimizer) == pytest.approx((size, size, 2 * size))
    # A tile of 800 tokens × 320, and the head's gradient.
    assert full.lm_head == pytest.approx((800 * 320 * 4 + 320 * 64 * 4) / 2**30) and full.engine == 0
    assert full.activations == pytest.approx(800 * 2 * (8 * 64 + 4 * 128) * 4 / 2**30)
    assert full.total == pytest.approx(
        sum((full.weights, full.gradients, full.optimizer, full.activations, full.lm_head))
    )
    assert needed().activations < full.activations
    packed = {"prefix_sharing": "on", "max_packed_tokens": 200}
    assert needed(loss_type="dapo", token_micro_batches=True, **packed).activations < needed(**packed).activations
    assert needed(beta=0.1).weights == pytest.approx(2 * size)
    assert needed(optim="adamw_8bit").optimizer == pytest.approx(size / 2)

    for sharding, weights, gradients in (("none", 1, 1), ("zero2", 1, 4), ("fsdp", 4, 4), ("zero3", 4, 4)):
        shared = needed(Launch(4, 1, sharding))
        assert (shared.weights, shared.gradients) == pytest.approx((size / weights, size / gradients))
        assert (shared.gathered > 0) == (sharding in ("fsdp", "zero3"))
    unreduced = {"gradient_accumulation_kwargs": {"sync_each_batch": False}}
    late = needed(Launch(4, 1, "fsdp"), accelerator_config=unreduced, gradient_accumulation_steps=2)
    assert late.gradients == pytest.approx(size / 4 + size)

    lora = needed(use_peft=True, lora_r=8, use_vllm=True)
    adapter = 8 * shape.lora_per_rank * 4 / 2**30
    assert lora.gradients == pytest.approx(adapter) and lora.weights == pytest.approx(size + adapter)
    assert lora.engine == pytest.approx(size)
    assert needed(use_vllm=True, vllm_mode="server").engine == 0
    qlora = needed(use_peft=True, lora_r=8, load_in_4bit=True)
    assert size / 8 < qlora.weights < size and qlora.gradients == pytest.approx(adapter / 2)


def test_adapter_parameters_are_counted_as_peft_makes_them(tiny_model_dir, tiny_model):
    import copy

    from peft import LoraConfig, get_peft_model

    shape = memory.model_shape(AutoConfig.from_pretrained(tiny_model_dir))
    model = get_peft_model(
        copy.deepcopy(tiny_model), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert model.get_nb_trainable_parameters()[0] == 4 * shape.lora_per_rank


def test_the_launch_of_a_recipe_is_taken_into_account(write, diagnose, tmp_path):
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    recipe = write(accelerate_config=str(path))
    _, findings = diagnose("--config", recipe)
    [sizes] = [finding["message"] for finding in findings if finding["check"] == "sizes"]
    assert "8 prompts × 4 rows" in sizes and sizes.endswith("on 4 processes (DDP)")
    path.write_text("distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {zero_stage: 3}\n")
    status, findings = diagnose("--config", recipe)
    [problem] = [finding["message"] for finding in findings if finding["status"] == "problem"]
    assert status == 1 and 'pip install "deepspeed"' in problem
