"""Where Lightning's loops stand after a number of steps, whatever moment the checkpoint was written at.

Lightning saves the counters of the moment and restarts differently from each: before or after validation,
within a batch or at its end. Here a checkpoint is only written when its step is wholly done, validation
included, so the step says all: the loops are set as after it, and the data module's `start_step` is the step.
"""

from typing import Any

from lightning.pytorch import Trainer


def fit_loop_state(trainer: Trainer, step: int, num_steps: int) -> dict[str, Any]:
    """Return the state of the fit loop after `step` of the `num_steps` steps of its one epoch."""
    state = trainer.fit_loop.state_dict()
    if step == 0:
        return state
    finished = int(step == num_steps)
    # As at the end of a training batch: Lightning completes that batch and does not validate it again.
    batches = {"ready": step, "started": step, "processed": step, "completed": step - 1}
    epochs = {"ready": 1, "started": 1, "processed": finished, "completed": finished}
    updates = {"ready": step, "completed": step}
    for name, counts in (
        ("epoch_progress", epochs),
        ("epoch_loop.batch_progress", batches),
        ("epoch_loop.manual_optimization.optim_step_progress", updates),
    ):
        state[name]["total"].update(counts)
        state[name]["current"].update(counts)
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = step - 1
    return state
