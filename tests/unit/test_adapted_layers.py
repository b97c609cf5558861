"""Adapters: what of them reaches vLLM, and where their tokenizer is."""

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from peft import LoraConfig, get_peft_model
from transformers import Qwen3Config, Qwen3ForCausalLM

from arpo_trl.commands.doctor.examination import examine
from arpo_trl.training import adapters
from arpo_trl.training.adapters import check_adapters_for_vllm, merged_parameters, tokenizer_source


def tiny(tied: bool) -> Qwen3ForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=tied))


def lora(**options) -> LoraConfig:
    return LoraConfig(r=2, task_type="CAUSAL_LM", **{"target_modules": ["q_proj"], **options})


@pytest.mark.parametrize(
    ("options", "module", "by"),
    [
        ({"modules_to_save": ["lm_head"]}, "lm_head", "modules_to_save"),
        ({"modules_to_save": ["embed_tokens"]}, "model.embed_tokens", "modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "model.embed_tokens", "target_modules"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head", "target_modules"),
        ({"target_modules": r".*(q_proj|embed_tokens)"}, "model.embed_tokens", "target_modules"),
        ({"target_parameters": ["lm_head.weight"]}, "lm_head", "target_parameters"),
        ({"target_modules": "all-linear"}, None, None),
        ({"target_modules": "all-linear", "modules_to_save": ["norm"]}, None, None),
        ({"target_modules": "all-linear", "exclude_modules": ["lm_head"]}, None, None),
        ({}, None, None),
    ],
)
@pytest.mark.parametrize("how", ["folder", "model", "adapter", "peft model"])
def test_an_adapter_on_a_tied_layer_is_refused_by_name(tmp_path, options, module, by, how):
    for tied in (True, False):
        model, config = tiny(tied), lora(**options)
        folder = tmp_path / str(tied)
        model.save_pretrained(folder)
        if how == "folder":
            model = str(folder)
        elif how == "adapter":
            config.base_model_name_or_path = str(folder)
            config.save_pretrained(folder / "adapter")
            model, config = str(folder / "adapter"), None
        elif how == "peft model":
            model, config = get_peft_model(model, config), None
        if tied and module is not None:
            with pytest.raises(ValueError, match=rf"changes .*{module} \(by {by}\).*tie_word_embeddings: true"):
                check_adapters_for_vllm(model, config, {})
        else:
            check_adapters_for_vllm(model, config, {})


@pytest.mark.parametrize("tied", [True, False])
def test_trainable_tokens_are_refused_by_name(tied):
    with pytest.raises(ValueError, match="trainable_token_indices.*use_vllm: false"):
        check_adapters_for_vllm(tiny(tied), lora(trainable_token_indices=[1, 2]), {})
    check_adapters_for_vllm(tiny(tied), None, {})


def test_the_doctor_says_so(tiny_model_dir, tmp_path):
    recipe = tmp_path / "arpo.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_model_dir}\nuse_cpu: true\nbf16: false\nuse_vllm: true\nuse_peft: true\n"
        "lora_target_modules: [q_proj]\nlora_modules_to_save: [embed_tokens]\noutput_dir: unused\nreport_to: none\n"
    )
    [found] = [finding for finding in examine(str(recipe)) if finding.check == "model"]
    assert found.status == "problem" and "tie_word_embeddings" in found.message and "embed_tokens" in found.message


@pytest.mark.parametrize("active", ["default", "other"])
def test_only_the_copy_of_a_module_that_is_trained_goes_to_the_engine(active):
    """TRL keeps a frozen adapter "ref", with copies of its own, where an adapter is trained further with beta > 0."""
    model = tiny(tied=False)
    names = dict(model.named_parameters()).keys()
    adapted = get_peft_model(model, lora(modules_to_save=["norm", "lm_head"]), adapter_name=active)
    adapted.add_adapter("ref", adapted.peft_config[active])
    wrapped = adapted.get_base_model().model.norm.modules_to_save
    with torch.no_grad():
        wrapped[active].weight.fill_(2.0)
        wrapped["ref"].weight.fill_(3.0)
    pushed = list(merged_parameters(adapted))
    assert sorted(name for name, _ in pushed) == sorted(names)
    assert (dict(pushed)["model.norm.weight"] == 2.0).all()


def hub(monkeypatch, error, offline=False):
    """A Hub with an adapter, which answers with an error when asked for the tokenizer."""

    def download(*_, **__):
        raise error

    monkeypatch.setattr(adapters, "hf_hub_download", download)
    monkeypatch.setattr(adapters, "is_adapter", lambda *_: True)
    monkeypatch.setattr(adapters, "base_of", lambda *_: ("org/base", None))
    monkeypatch.setattr(adapters, "is_offline_mode", lambda: offline)


class Response:
    """As much of one as the errors of `huggingface_hub` look at."""

    headers: dict = {}
    request = None
    status_code = 503


def test_an_adapter_without_a_tokenizer_has_its_bases(monkeypatch, tmp_path):
    hub(monkeypatch, EntryNotFoundError("404"))
    assert tokenizer_source("org/adapter") == ("org/base", None)
    hub(monkeypatch, LocalEntryNotFoundError("not there"), offline=True)
    assert tokenizer_source("org/adapter") == ("org/base", None)
    assert tokenizer_source(tmp_path) == ("org/base", None)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_source(tmp_path, "main") == (str(tmp_path), "main")


@pytest.mark.parametrize(
    "error",
    [LocalEntryNotFoundError("no connection"), HfHubHTTPError("503\nService Unavailable", response=Response())],
)
def test_a_hub_that_fails_is_no_hub_without_a_tokenizer(monkeypatch, error):
    hub(monkeypatch, error)
    with pytest.raises(OSError, match="whether the adapter org/adapter has a tokenizer of its own") as raised:
        tokenizer_source("org/adapter")
    assert "\n" not in str(raised.value)
