"""The package OpenVINO, without its telemetry.

At each import it would tell Google Analytics that it is used, from a fork of the process that imports it, and leave a
client's number in the home directory. It is imported from here, inside functions, since that takes a second.
"""

import sys

# OpenVINO and NNCF have stubs for where the package is not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as openvino  # noqa: E402
