"""The HTTP service around fxcore."""

import os

# By default OpenMP threads spin while they wait, which keeps a shared core from the very thread they wait for: eager
# batches took up to eighty times as long. The variable is read when torch is loaded, so it is set here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
