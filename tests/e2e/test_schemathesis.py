"""Requests made from the OpenAPI document, good and bad ones: every answer is one that the document promises.

A short form runs with the tests; ``FXSERVE_SCHEMATHESIS_EXAMPLES=200 pytest tests/e2e/test_schemathesis.py`` is longer.
"""

import os

import hypothesis
import pytest

EXAMPLES = int(os.environ.get("FXSERVE_SCHEMATHESIS_EXAMPLES", "4"))
# Said before there is a route that could have documented it.
UNROUTED = ("/problems/not-http", "/problems/head-too-large")


@pytest.fixture(scope="module")
def schema(start):
    import schemathesis  # takes two seconds, also of a process that collects this test and does not run it

    server = start(models="squeezenet1_1", max_body_bytes=1_000_000)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # What is well-formed may still name what there is not, or be an image that is none.
    schema.config.checks.positive_data_acceptance.expected_statuses += ["400", "413", "422"]
    return schema


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["negative", "positive"])
def test_every_response_is_documented(schema, mode):
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error

    failures = {}
    for operation in schema.get_all_operations():
        case = operation.ok().as_strategy(GenerationMode(mode))

        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
        )
        @hypothesis.given(case=case)
        def check(case):
            response = case.call(timeout=60)
            if not any(problem in response.text for problem in UNROUTED):
                # A deadline that no server could keep is the client's own.
                too_late = response.status_code == 504 and "x-request-timeout" in map(str.lower, case.headers)
                case.validate_response(response, excluded_checks=[not_a_server_error] if too_late else [])

        try:
            check()
        except hypothesis.errors.Unsatisfiable:
            pass  # nothing about it can be wrong
        except BaseExceptionGroup as group:
            failures[operation.ok().label] = group
    assert not failures, "\n".join(f"{label}: {group}" for label, group in failures.items())
