"""The images to extract features from: finding them, counting skipped files, and reading their regions."""
