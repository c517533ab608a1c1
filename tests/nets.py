"""Little networks for the tests, one for each thing that real networks do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def randomized(net: nn.Module, *, seed: int = 0) -> nn.Module:
    """In double precision and evaluation mode, as if trained: statistics, scales and sharp logits."""
    generator = torch.Generator().manual_seed(seed)
    net = net.double().eval()
    for module in net.modules():
        for name in ("weight", "bias"):
            value = getattr(module, name, None)
            if isinstance(value, Tensor) and value.dim() == 1:
                value.data += 0.2 * torch.randn(value.shape, generator=generator)
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    linear = [module for module in net.modules() if isinstance(module, nn.Linear)][-1]
    linear.weight.data.normal_(0, 1.5, generator=generator)
    return net


def small(norm: nn.Module, *, classes: int = 4) -> nn.Module:
    """A convolution to eight channels, `norm`, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        norm,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


class OwnLayerNorm(nn.Module):
    """LayerNorm over the channels of images, as people write it without torch's class."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - mean) * (var + 1e-5).rsqrt() * self.weight[:, None, None] + self.bias[:, None, None]


class ChannelsFirstLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of images, as ConvNeXts have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).permute(
            0, 3, 1, 2
        )


class BatchNormAct(nn.BatchNorm2d):
    """BatchNorm with its activation inside, as timm has it."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class Transformer(nn.Module):
    """Patches as tokens, and torch's own encoder layer with its fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.encoder(tokens).mean(1))  # type: ignore[no-any-return]


class Shared(nn.Module):
    """One normalization layer with two parents, one that is never called, dropout, and a list."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm2d(8)
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm)
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm)
        self.unused = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.5)
        self.order = [self.first, self.second]
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.order:
            x = self.dropout(F.relu(part(x)))
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


class Viewing(nn.Module):
    """Flattens with view(), which channels last does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 100, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x)).view(len(x), -1))  # type: ignore[no-any-return]


def affine_parameters(net: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for module in net.modules()
        if isinstance(module, _BatchNorm)
        for parameter in (module.weight, module.bias)
    ]
