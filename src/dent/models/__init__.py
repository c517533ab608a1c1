"""Architectures as published, and all models by name."""

from __future__ import annotations

from dent.models.architectures import MODELS, Architecture, build
from dent.models.imagenet import ResNet50, resnet50
from dent.models.normalization import Normalized, PerImageNormalized
from dent.models.preact import PreActResNet18, preact_resnet18, preact_resnet18_bn
from dent.models.resnet import (
    CifarResNet,
    resnet18,
    resnet20,
    resnet26_4,
    resnet32,
    resnet32_10,
    resnet56,
)
from dent.models.robustbench import ROBUSTBENCH
from dent.models.wide import WideResNet, wrn_28_4, wrn_28_10, wrn_34_10
from dent.models.zoo import load_model, model_table

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
    "load_model",
    "model_table",
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
