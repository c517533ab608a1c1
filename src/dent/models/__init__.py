"""Architectures as published, and all models by name."""

from __future__ import annotations

from dent.models.architectures import MODELS, Architecture, build
from dent.models.normalization import Normalized, PerImageNormalized
from dent.models.preact import PreActResNet18, WideResNet
from dent.models.resnet import CifarResNet, ResNet50, resnet20
from dent.models.robustbench import ROBUSTBENCH
from dent.models.zoo import find_class_names, list_models, load_model

__all__ = [
    "MODELS",
    "ROBUSTBENCH",
    "Architecture",
    "CifarResNet",
    "Normalized",
    "PerImageNormalized",
    "PreActResNet18",
    "ResNet50",
    "WideResNet",
    "build",
    "find_class_names",
    "list_models",
    "load_model",
    "resnet20",
]
