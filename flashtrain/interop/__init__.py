"""Checkpoints of Hugging Face's format, in and out: settings, tensors and the folders that hold both."""
