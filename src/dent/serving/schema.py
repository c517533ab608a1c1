"""What requests and responses look like, for the OpenAPI schema."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from dent.serving.inputs import BYTES, FORM, JSON, NPY, PICTURES
from dent.serving.settings import Serving


class Said(BaseModel):
    """What the static model says."""

    label: int = Field(alias="class")
    name: str
    probabilities: list[float]
    entropy: float


class Image(BaseModel):
    """What the defended model says of one image; entropies in nats, seconds of its batch."""

    label: int = Field(alias="class")
    name: str
    probabilities: list[float]
    entropy_before: float
    entropy_after: float
    steps: int
    static: Said
    seconds: float


class Answers(BaseModel):
    """What the defended model says of each image, in order, and what the static one says."""

    answers: list[Image]


class Health(BaseModel):
    """That there is a model, which, and how its clients are kept apart."""

    status: str
    model: str
    defense: str
    isolation: str


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        400: "The body cannot be read",
        401: "The token is missing or wrong",
        408: "The body did not come in time",
        413: "The body or an image is too large",
        415: "The content type is none of those that are read",
        422: "Images of the wrong shape, size or range, or too many",
        429: "Too many requests at once; the header Retry-After says when to try again",
        500: "The model failed on an image",
        503: "No model is there; the header Retry-After says when to try again",
        504: "There was no answer in time",
    }.items()
}

# Where the answer itself is no JSON, FastAPI would take the error for none either.
UNAUTHORIZED: dict[str, Any] = {
    "description": ERRORS[401]["description"],
    "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}},
}


def request_body(serving: Serving) -> dict[str, Any]:
    """The bodies that `/predict` takes: files, arrays, or a form of these."""
    file = {"schema": {"type": "string", "format": "binary"}}
    sides = [{"minItems": 1}] * 2 if serving.resize else [_exactly(side) for side in serving.size]
    image = {"type": "number", "minimum": 0, "maximum": 1}
    for bounds in (sides[1], sides[0], _exactly(3)):
        image = {"type": "array", "items": image, **bounds}
    images = {"type": "array", "items": image, "minItems": 1, "maxItems": serving.max_images}
    array = {
        "type": "object",
        "properties": {"inputs": {"anyOf": [image, images]}},
        "required": ["inputs"],
        "additionalProperties": False,
    }
    form = {
        "type": "object",
        "properties": {"image": {"type": "string", "format": "binary"}},
        "required": ["image"],
        "additionalProperties": False,
    }
    return {
        "required": True,
        "content": dict.fromkeys((*PICTURES, NPY, BYTES), file)
        | {JSON: {"schema": array}}
        | {FORM: {"schema": form, "encoding": {"image": {"contentType": ", ".join(PICTURES)}}}},
    }


def _exactly(count: int) -> dict[str, int]:
    return {"minItems": count, "maxItems": count}
