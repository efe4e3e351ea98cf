"""The runtime of an extractor: its backend and other candidates, its transforms, and its memory use."""
