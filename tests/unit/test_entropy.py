"""The entropy formula and the record between sampler and engine."""

import pytest
import torch

from arpo_trl.algorithms.entropy import entropy_from_logits
from arpo_trl.rollout.entropy import EntropyRecorder


def test_entropy_agrees_with_double_precision():
    logits = torch.randn(130, 5000, generator=torch.Generator().manual_seed(0)) * 4
    probs = logits.double().softmax(-1)
    torch.testing.assert_close(
        entropy_from_logits(logits, chunk_size=32).double(), -(probs * probs.log()).sum(-1), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_and_impossible_tokens_count_nothing(dtype):
    logits = torch.full((3, 8), -torch.inf, dtype=dtype)
    logits[0, 2] = 1.0
    logits[1, [1, 5]] = 0.5
    logits[2, :] = torch.tensor([0.0, -300.0, 0.0, -300.0, 0.0, -300.0, 0.0, -torch.inf])
    expected = torch.tensor([0.0, 2.0, 4.0]).clamp(min=1).log()
    torch.testing.assert_close(entropy_from_logits(logits), expected)


def test_last_write_of_a_position_wins():
    recorder = EntropyRecorder()
    recorder.open("a")
    for value in (5.0, 6.0, 7.0):
        recorder.write([("a", 0)], torch.tensor([value]))
    assert recorder.read("a", 0, 1) == [7.0]
    recorder.write([("a", 1), ("a", 0)], torch.tensor([1.0, 2.0]))
    assert recorder.read("a", 0, 2) == [2.0, 1.0]


def test_a_position_never_written_is_an_error():
    recorder = EntropyRecorder()
    recorder.open("a")
    recorder.write([("a", 0)], torch.tensor([1.0]))
    with pytest.raises(KeyError):
        recorder.read("a", 0, 2)


def test_nothing_is_kept_of_closed_and_unknown_requests():
    recorder = EntropyRecorder()
    recorder.open("a")
    recorder.close("a")
    recorder.close("unknown")
    recorder.open("b")
    recorder.write([("a", 0), ("b", 0), ("c", 0)], torch.tensor([1.0, 2.0, 3.0]))
    assert recorder.read("b", 0, 1) == [2.0]
    recorder.close("b")
    assert not recorder._by_request and not recorder._pending
