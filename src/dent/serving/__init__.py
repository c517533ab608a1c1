"""A defended model behind HTTP."""

from __future__ import annotations

from dent.serving.answers import Answer, Failed, Prediction, answer_batch
from dent.serving.inputs import Refused, read_images
from dent.serving.settings import INDEPENDENT, Serving, make_serving

__all__ = [
    "INDEPENDENT",
    "Answer",
    "Failed",
    "Prediction",
    "Refused",
    "Serving",
    "answer_batch",
    "make_serving",
    "read_images",
]
