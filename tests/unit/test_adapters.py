"""Options of quantized training, checked before a model is loaded."""

import pytest
from trl import ModelConfig, get_peft_config, get_quantization_config

from arpo_trl.training import adapters
from arpo_trl.training.adapters import check_quantization


QLORA = {
    "use_peft": True,
    "load_in_4bit": True,
    "model_name_or_path": "a/model",
    "lora_target_modules": ["all-linear"],
}


@pytest.mark.parametrize(
    ("options", "use_vllm", "installed", "message"),
    [
        ({"use_peft": False}, True, True, "load_in_4bit .* set use_peft: true"),
        (
            {"load_in_4bit": False, "load_in_8bit": True},
            True,
            True,
            "4 or 8 bits: set use_vllm: false, or .* load_in_8bit",
        ),
        ({}, True, True, "4 or 8 bits: set use_vllm: false, or leave load_in_4bit out"),
        ({}, False, False, "pip install bitsandbytes"),
    ],
)
def test_what_qlora_cannot_do_is_refused(monkeypatch, options, use_vllm, installed, message):
    monkeypatch.setattr(adapters, "is_bitsandbytes_available", lambda: installed)
    with pytest.raises((ValueError, ImportError), match=message):
        check_quantization(ModelConfig(**{**QLORA, **options}), use_vllm)


@pytest.mark.parametrize("variant", ["use_rslora", "use_dora"])
def test_qlora_options_reach_peft_and_bitsandbytes(monkeypatch, tmp_path, variant):
    monkeypatch.setattr(adapters, "is_bitsandbytes_available", lambda: True)
    options = ModelConfig(**QLORA, **{variant: True}, bnb_4bit_quant_type="nf4", use_bnb_nested_quant=True)
    check_quantization(options, use_vllm=False)
    quantization, peft = get_quantization_config(options), get_peft_config(options)
    assert quantization.load_in_4bit and quantization.bnb_4bit_quant_type == "nf4"
    assert quantization.bnb_4bit_use_double_quant
    assert getattr(peft, variant) and peft.target_modules == "all-linear"

    # An adapter that is trained further needs no use_peft.
    (tmp_path / "adapter_config.json").write_text("{}")
    check_quantization(ModelConfig(model_name_or_path=str(tmp_path), load_in_4bit=True), use_vllm=False)
