"""Training on Lightning: one batch is one optimizer step, exact to resume."""
