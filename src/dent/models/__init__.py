"""Architectures as published, and all models by name."""

from __future__ import annotations

from dent.models.architectures import MODELS, Architecture, build
from dent.models.normalization import Normalized, PerImageNormalized
from dent.models.preact import (
    PreActResNet18,
    WideResNet,
    preact_resnet18,
    preact_resnet18_bn,
    wrn_28_4,
    wrn_28_10,
    wrn_34_10,
)
from dent.models.resnet import (
    CifarResNet,
    ResNet50,
    resnet18,
    resnet20,
    resnet26_4,
    resnet32,
    resnet32_10,
    resnet50,
    resnet56,
)
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
    "preact_resnet18",
    "preact_resnet18_bn",
    "resnet18",
    "resnet20",
    "resnet26_4",
    "resnet32",
    "resnet32_10",
    "resnet50",
    "resnet56",
    "wrn_28_4",
    "wrn_28_10",
    "wrn_34_10",
]
