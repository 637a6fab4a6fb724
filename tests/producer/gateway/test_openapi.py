"""The OpenAPI page, and requests made up from it: whatever comes, the service answers as it says it does."""

from __future__ import annotations

from collections.abc import Callable

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from contract.sampling import SamplingParams
from tests.producer.gateway.conftest import Listening
from tests.producer.gateway.scripted import ScriptedWorker

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 5
KEY = {"Authorization": "Bearer secret"}


def test_made_up_requests_are_answered_as_documented(
    worker: ScriptedWorker, listening: Callable[..., Listening]
) -> None:
    service = listening(serve_api_key="secret")
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/generate", "/v1/chat/completions", "/v1/files"}
    for operation in operations:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def run(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, headers=KEY, timeout=20)

        run()


def test_the_page_lists_parameters_and_errors(listening: Callable[..., Listening]) -> None:
    service = listening(serve_api_key="secret")
    assert "swagger" in service.client.get("/docs").text.lower()
    document = service.client.get("/openapi.json").json()
    assert document["components"]["schemas"]["ChatBody"]["properties"].keys() >= SamplingParams.model_fields.keys()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert chat["responses"].keys() >= {"200", "400", "401", "404", "413", "422", "429", "503", "504"}
    assert chat["security"]
