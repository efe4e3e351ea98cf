"""The HTTP service around fxcore."""

import os

# By default idle OpenMP threads spin, which on a shared core starves the very thread they wait for. OpenMP reads the
# variable when torch is loaded, so it is set before that.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
