"""The time of a fit's steps, and a fit without validation and checkpoints."""

import pytest
from tiny_training import Steps, make_module, make_trainer

from flashtrain.training.timed import TimedSteps


@pytest.mark.parametrize("untimed", [0, 2])
def test_all_steps_but_the_first_are_timed(tmp_path, monkeypatch, untimed):
    """By a clock that goes on by a second a step."""
    timed, data = TimedSteps(untimed, 5 - untimed, "cpu"), Steps(5)
    monkeypatch.setattr("flashtrain.performance.timing.time.perf_counter", lambda: float(trainer.global_step))
    trainer = make_trainer(tmp_path, 5, trace=timed, validate_every=None)
    trainer.fit(make_module(5), data)
    assert timed.seconds == 5 - untimed and data.seen == list(range(5))
    assert trainer.strategy.optimizers == []


def test_without_validation_nothing_is_validated_and_without_checkpoints_nothing_is_kept(tmp_path):
    module = make_module(3)
    trainer = make_trainer(tmp_path, 3, validate_every=None, checkpoints=None)
    trainer.fit(module, Steps(3))
    assert trainer.global_step == 3 and module.validation_metrics == {} and list(tmp_path.iterdir()) == []
