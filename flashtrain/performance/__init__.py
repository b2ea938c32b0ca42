"""What a speed means, how it is measured, and what the hardware could do."""
