"""Ten thousand answers: whatever a model writes, rewards are in their ranges and right about plain values."""

import pytest
from hypothesis import HealthCheck, given, settings

from arpo_trl.rewards.math_verifier import MathVerifier
from tests.fuzzed_answers import COMPLETIONS, GOLDS, WRITTEN, check_any, check_values


pytestmark = pytest.mark.slow
FUZZED = settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def verifier():
    verifier = MathVerifier(num_workers=1, timeout_s=0.5)
    yield verifier
    verifier.close()


@FUZZED
@given(completion=COMPLETIONS, gold=GOLDS)
def test_any_text_with_any_accepted_answer(verifier, completion, gold):
    check_any(completion, gold, verifier)


@FUZZED
@given(prediction=WRITTEN, gold=WRITTEN)
def test_plain_values_in_any_notation(verifier, prediction, gold):
    check_values(prediction, gold, verifier)
