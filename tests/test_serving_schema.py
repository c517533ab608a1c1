"""The OpenAPI schema says what the server does: Schemathesis asks it all that the schema allows."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from test_serving_app import app, npy

schemathesis = pytest.importorskip("schemathesis")
image = pytest.importorskip("PIL.Image")

# Files that the schema can only call bytes.
FILES: dict[str, bytes] = {"application/x-npy": npy(np.zeros((3, 2, 2)))}
for kind in ("PNG", "JPEG"):
    file = BytesIO()
    image.new("RGB", (2, 2), "red").save(file, kind)
    FILES[f"image/{kind.lower()}"] = file.getvalue()
FILES["application/octet-stream"] = FILES["image/png"]
for name, content in FILES.items():
    schemathesis.openapi.media_type(name, st.just(content))

# A body that is refused for its length is one that breaks the schema.
CHECKS = {"negative_data_rejection": {"expected-statuses": [400, 401, 405, 413, 415, 422]}}
FEW = settings(max_examples=10, suppress_health_check=list(HealthCheck))


def schema(token: str | None = None) -> Any:
    known = {"auth": {"openapi": {"token": {"bearer": token}}}} if token else {}
    config = schemathesis.Config.from_dict({"checks": CHECKS, **known})
    return schemathesis.openapi.from_asgi("/openapi.json", app(token=token), config=config)


@schema().parametrize()  # type: ignore[untyped-decorator]
@FEW
def test_schema(case: Any) -> None:
    case.call_and_validate()


@schema("secret").parametrize()  # type: ignore[untyped-decorator]
@FEW
def test_schema_with_a_token(case: Any) -> None:
    """It also asks without the token, and with wrong ones."""
    case.call_and_validate()


def test_the_schema_names_all_that_is_refused() -> None:
    paths = schema("secret").raw_schema["paths"]
    assert set(paths) == {"/", "/predict", "/health", "/metrics"}
    assert set(paths["/predict"]["post"]["responses"]) == {
        "200", "400", "401", "408", "413", "415", "422", "429", "500", "503", "504",
    }  # fmt: skip
    assert set(paths["/predict"]["post"]["requestBody"]["content"]) == {
        *FILES, "application/json", "multipart/form-data",
    }  # fmt: skip
