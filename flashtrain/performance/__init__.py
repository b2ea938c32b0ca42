"""What a speed means: operations per token and what the hardware could do."""
