"""What computes an extractor: its backend and those measured before, its transforms, and its bytes in memory."""
