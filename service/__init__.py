"""The HTTP service around fxcore."""

import os

# OpenMP threads that wait for each other spin by default, and one that spins keeps the core from whom it waits for:
# with others on the same cores, eager batches took up to eighty times as long. Read when torch is loaded, so set here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
