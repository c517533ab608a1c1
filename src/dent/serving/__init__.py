"""Serve a defended model over HTTP."""

from __future__ import annotations

from dent.serving.answers import Answer, ModelError, Prediction, answer_batch
from dent.serving.inputs import Refusal, read_images
from dent.serving.settings import Serving

__all__ = [
    "Answer",
    "ModelError",
    "Prediction",
    "Refusal",
    "Serving",
    "answer_batch",
    "read_images",
]
