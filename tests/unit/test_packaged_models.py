"""Models that a Python package carries are taken where the Hub is out of reach, however that shows."""

import httpx
import pytest

from arpo_trl.demo.packaged_models import PACKAGED, resolve_model


@pytest.mark.parametrize("error", [httpx.ConnectError("no such host"), httpx.ConnectTimeout("late"), OSError("down")])
def test_a_hub_out_of_reach(error, monkeypatch, tmp_path):
    def file_exists(*args):
        raise error

    monkeypatch.setattr("huggingface_hub.file_exists", file_exists)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr("arpo_trl.demo.packaged_models._unpack", lambda package, source, target: target.mkdir())
    [name] = PACKAGED
    assert resolve_model(name, packaged=True, folder=str(tmp_path)) == str(tmp_path / name.split("/")[1])
    with pytest.raises(ValueError, match="no package carries it"):
        resolve_model("nobody/nothing", packaged=True)
    assert resolve_model("nobody/nothing") == "nobody/nothing"
