"""The description of all paths is valid, complete, and true of random requests."""

import re

import pytest
from starlette.responses import JSONResponse

from coldpress.server import app
from tests.server.conftest import TEMPLATE
from tests.support.command_line import speaking_artifact
from tests.support.schemathesis import schemathesis_run
from tests.support.serving import serving_here


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """An artifact with a context of 64 tokens, so that no random request takes long."""
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    return speaking_artifact(tmp_path_factory.mktemp("small"), context_length=64, template=TEMPLATE, **shape).path


@pytest.mark.slow
def test_random_requests_get_what_the_description_says(small, tmp_path):
    with serving_here(small, max_tokens=4) as server:
        found = schemathesis_run(server.url, tmp_path, ("fuzzing",), 15)
    assert found.failures == ()
    assert found.num_operations == len(app.ENDPOINTS) - 1  # all but the description itself
    assert found.num_requests > 80


@pytest.mark.slow
def test_a_server_that_does_not_keep_to_it_is_found(small, tmp_path, monkeypatch):
    async def other(request, served):
        return JSONResponse({"error": "no message"}, status_code=418)

    broken = [one._replace(handler=other) if one.path == "/tokenize" else one for one in app.ENDPOINTS]
    monkeypatch.setattr(app, "ENDPOINTS", tuple(broken))
    with serving_here(small, max_tokens=4) as server:
        found = schemathesis_run(server.url, tmp_path, ("fuzzing",), 2)
    assert any("/tokenize" in failure for failure in found.failures)


def test_every_path_says_what_it_takes(server):
    found = server.send("GET", "/openapi.json").json
    post = found["paths"]["/v1/completions"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = found["components"]["schemas"][schema]
    assert (fields["properties"]["model"]["enum"], fields["additionalProperties"]) == (["tiny"], False)
    assert {"prompt", "max_tokens", "stream"} <= set(fields["properties"])
    assert set(post["responses"]) == {"200", "400", "401", "404", "413", "415", "429", "503"}
    assert set(found["paths"]["/health"]["get"]["responses"]) == {"200", "503"}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            assert re.fullmatch(r"[A-Z].*\.", operation["summary"]), path


def test_a_wrong_method_is_told_the_right_ones(server):
    answer = server.send("GET", "/v1/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
