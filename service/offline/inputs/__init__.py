"""Images to extract features from: where they are found, what is skipped, and which regions they have."""
