"""The ``openvino`` package without its telemetry.

At each import, OpenVINO would report to Google Analytics from a fork of the importing process, and leave a client id in
the home directory. Import it from here, and inside functions, since the import takes a second.
"""

import sys

# OpenVINO and NNCF fall back to stubs if the telemetry package is not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as openvino  # noqa: E402
