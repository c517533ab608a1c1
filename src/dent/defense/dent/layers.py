"""Delta: a private copy of a model whose normalization layers take scale, shift and statistics as
arguments (section 3.2).

The copy has modules of its own and shares the model's tensors. Its normalization layers are made
adaptable once, when it is built; a call is then a function of tensors, `torch.func.functional_call`.
Adapting the model itself would mean restoring its mode, parameters and hooks after every call, and two
threads could not do it at once.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from dent.defense.dent.checks import affine_names, check_shape, explain_failure, find_layers

Tensors = dict[str, Tensor]
# From what enters a BatchNorm layer (N, C, ...), its mean and its variance of training to those it uses.
Estimate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_LOG = logging.getLogger("dent")
_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
_STOCK_FORWARDS = (nn.BatchNorm2d.forward, nn.SyncBatchNorm.forward)


class AdaptableModel:
    """A model as a function of its tensors: the logits of any inputs under any Delta.

    test_share: weight of the test batch in the BatchNorm statistics; 0 uses those of training. A
    function estimates them instead.
    compile, channels_last: as in `Dent`.
    layers: names of normalization layers of the user's own, which are adapted too.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        test_share: float | Estimate = 0.0,
        compile: bool = False,
        channels_last: bool | None = None,
        layers: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.layers = layers
        self.test_share = test_share
        self.compile = compile
        self.channels_last = channels_last
        self.affine_names = [
            f"{name}.{one}".lstrip(".")
            for name, layer in find_layers(model, layers).items()
            for one in affine_names(layer)
        ]
        self._compiled_for: set[torch.Size] = set()
        self._accepts_channels_last: dict[tuple[Any, ...], bool] = {}  # by shape and dtype
        self._idle = [self._build()]  # copies that no thread is using

    def __call__(
        self, inputs: Tensor, tensors: Tensors, delta: Tensor | None = None, *, eager: bool = False
    ) -> Tensor:
        """Return the logits (N, classes) at theta + Delta.

        tensors: theta, from `read_tensors`; with those of `measure_statistics` to use them.
        delta: (1 or N, parameters), or None for the model's own scales and shifts.
        eager: do not use the compiled function; torch cannot differentiate it twice.
        """
        inputs, call = self.lay_out(inputs), functional_call
        if self.compile and not eager:
            call = _compile_call()
            if inputs.shape not in self._compiled_for:
                self._compiled_for.add(inputs.shape)
                _LOG.warning(
                    "compiling for inputs of shape %s; this call can take a minute, later ones are fast",
                    tuple(inputs.shape),
                )
        with explain_failure(inputs, self.model), self._borrow() as net:
            logits: Tensor = call(net, self.add_delta(tensors, delta), (inputs,), tie_weights=False)
        check_shape(logits, inputs, type(self.model).__name__)
        return logits.to(inputs.dtype)  # autocast halves them, and entropies and losses need the digits

    def call_hooked(
        self, inputs: Tensor, tensors: Tensors, kind: type[nn.Module], hook: Callable[..., None]
    ) -> Tensor:
        """Return the logits; call `hook(name, layer, args)` before each layer of this kind."""
        with ExitStack() as hooks, self._borrow() as net:
            for name, layer in net.named_modules():
                if isinstance(layer, kind):
                    hooks.enter_context(layer.register_forward_pre_hook(partial(hook, name)))
            return functional_call(net, tensors, (self.lay_out(inputs),), tie_weights=False)  # type: ignore[no-any-return]

    def measure_statistics(self, inputs: Tensor, tensors: Tensors, delta: Tensor | None) -> Tensors:
        """Return the mean and variance that each BatchNorm layer uses for these inputs, by name."""
        measured: Tensors = {}

        def measure(name: str, layer: nn.Module, args: tuple[Tensor]) -> None:
            mean, var = _get_statistics(layer, args[0], self.test_share)
            measured.update({f"{name}.frozen_mean": mean, f"{name}.frozen_var": var})

        with torch.no_grad():
            self.call_hooked(inputs, self.add_delta(tensors, delta), _BatchNorm, measure)
        return measured

    def read_tensors(self) -> Tensors:
        """Return the model's parameters and buffers of now, as constants that share their memory."""
        return {
            f"{prefix}.{name}".lstrip("."): _as_constant(value)
            for prefix, module in self.model.named_modules()
            for values in (module._parameters, module._buffers)
            for name, value in values.items()
            if value is not None
        }

    def flatten_affine(self, tensors: Tensors) -> Tensor:
        """Return all scales and shifts as one row, in float32 at least: half would lose small steps."""
        row = torch.cat([tensors[name].flatten() for name in self.affine_names])
        return row.to(torch.promote_types(row.dtype, torch.float32))

    def add_delta(self, tensors: Tensors, delta: Tensor | None) -> Tensors:
        """Return theta + Delta: the tensors with adapted scales and shifts, each (1 or N, *shape)."""
        if delta is None:
            return tensors
        shapes = [tensors[name].shape for name in self.affine_names]
        columns = (self.flatten_affine(tensors) + delta).split([s.numel() for s in shapes], 1)
        named = zip(self.affine_names, columns, shapes, strict=True)
        return tensors | {name: column.reshape(-1, *shape) for name, column, shape in named}

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Return the inputs in the memory layout of the calls."""
        if inputs.dim() == 4 and self._uses_channels_last(inputs):
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _uses_channels_last(self, inputs: Tensor) -> bool:
        if self.channels_last is not None:
            return self.channels_last
        if inputs.device.type != "cpu" or inputs.dtype not in (torch.float32, torch.float64):
            return False  # not measured to be faster there
        kind = (inputs.shape[1:], inputs.dtype)
        if kind not in self._accepts_channels_last:
            self._accepts_channels_last[kind] = _accepts_channels_last(self.model, inputs.detach()[:2])
        return self._accepts_channels_last[kind]

    @contextmanager
    def _borrow(self) -> Iterator[nn.Module]:
        """Lend a copy to one thread: `functional_call` puts tensors into its modules for a while."""
        try:
            net = self._idle.pop()
        except IndexError:
            net = self._build()
        try:
            yield net
        finally:
            self._idle.append(net)

    def _build(self) -> nn.Module:
        net = _copy_structure(self.model).eval()
        for name, layer in find_layers(net, self.layers).items():
            _make_adaptable(name, layer, self.test_share)
        for module in net.modules():  # keep no tensor alive that the model may replace
            for values in (module._parameters, module._buffers):
                values.update(dict.fromkeys(values))
        return net

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": []}  # copies and pickles build their own


@cache
def _compile_call() -> Any:
    return torch.compile(functional_call, dynamic=False)


def _copy_structure(model: nn.Module) -> nn.Module:
    """Return copies of all modules and of what they hold, sharing the model's tensors and hooks."""
    shared: list[Any] = []
    for module in model.modules():
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
        shared += [*module._parameters.values(), *module._buffers.values()]
        for hooks in _HOOKS:
            shared += vars(module).get(hooks, {}).values()
    try:
        return copy.deepcopy(model, {id(value): value for value in shared if value is not None})
    except Exception as error:
        raise TypeError(
            f"the structure of {type(model).__name__} cannot be copied ({error}); keep what is not part "
            "of the network (files, locks, generators) out of its modules"
        ) from error


def _accepts_channels_last(model: nn.Module, inputs: Tensor) -> bool:
    """Return True if the model runs on channels-last images. One that flattens with view() does not.

    A throwaway copy without the user's hooks tries it. Any other error will come up in the real call.
    """
    net = _copy_structure(model).eval()
    for module in net.modules():
        for hooks in _HOOKS:
            vars(module).get(hooks, {}).clear()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            net(inputs.contiguous(memory_format=torch.channels_last))
    except Exception:
        return False
    return True


def _as_constant(value: Tensor) -> Tensor:
    value = value.detach()
    if value.is_inference() and not torch.is_inference_mode_enabled():
        value = value.clone()  # a tensor made in inference mode cannot take part in a graph
    return value


# The adaptable layers. A scale or shift is the model's own, or has rows (1 or N, *shape): theta + Delta.


def _make_adaptable(name: str, layer: Any, test_share: float | Estimate) -> None:
    """Replace the forward of a normalization layer of the copy."""
    is_batch_norm = isinstance(layer, _BatchNorm)  # mypy would narrow the type and refuse a new forward
    if is_batch_norm:
        layer.register_buffer("frozen_mean", None)
        layer.register_buffer("frozen_var", None)
        layer.forward = partial(_batch_norm, layer, name, test_share)
    else:
        dims = {one: getattr(layer, one).dim() for one in affine_names(layer)}
        layer.forward = partial(_other_norm, layer, name, dims)
        # nn.TransformerEncoderLayer reads the weights of its norms past their forward, unless one of
        # its modules has a hook.
        layer.register_forward_pre_hook(lambda layer, args: None)


def _batch_norm(layer: Any, name: str, test_share: float | Estimate, x: Tensor) -> Tensor:
    forward, affine = type(layer).forward, (layer.weight, layer.bias)
    share = 1.0 if layer.running_mean is None else test_share
    uses_batch, is_frozen = share != 0, layer.frozen_mean is not None
    if not uses_batch and not is_frozen and all(one is None or one.dim() == 1 for one in affine):
        return forward(layer, x)  # type: ignore[no-any-return]  # to the bit what the model computes
    weight, bias = (one[None] if one is not None and one.dim() == 1 else one for one in affine)
    _check_rows(name, x, weight, bias)
    if uses_batch and not is_frozen and x.numel() == x.shape[1]:
        raise ValueError(
            f"statistics of the test batch need more than one value per channel, got "
            f"{tuple(x.shape)} at layer {name!r}; use larger batches or statistics='train'"
        )
    if share == 1 and not is_frozen and (weight is None or len(weight) == 1):
        scale, shift = (None if rows is None else rows[0] for rows in (weight, bias))
        y = F.batch_norm(x, None, None, scale, shift, training=True, eps=layer.eps)
    else:
        mean, var = _get_statistics(layer, x, test_share)
        inverse = (var + layer.eps).rsqrt()
        scale = inverse[None] if weight is None else weight * inverse
        y = channel_affine(x, scale, -mean * scale if bias is None else bias - mean * scale)
    if forward in _STOCK_FORWARDS:
        return y
    # A subclass may do more than normalize: its own forward follows, normalizing nothing.
    one = torch.ones(layer.num_features, dtype=y.dtype, device=y.device)
    zero = torch.zeros_like(one)
    identity = {"weight": one, "bias": zero, "running_mean": zero, "running_var": one - layer.eps}
    with _holding(layer, identity):
        return forward(layer, y)  # type: ignore[no-any-return]


def _get_statistics(layer: Any, x: Tensor, test_share: float | Estimate) -> tuple[Tensor, Tensor]:
    """Return the mean and variance that a BatchNorm layer uses for x."""
    if layer.frozen_mean is not None:
        return layer.frozen_mean, layer.frozen_var
    mean, var = layer.running_mean, layer.running_var
    exact = torch.promote_types(x.dtype, torch.float32)
    share = 1.0 if mean is None else test_share
    if mean is not None:
        mean, var = mean.to(exact), var.to(exact)
    if share == 0:
        return mean, var
    x = x.to(exact)
    if callable(share):
        return share(x, mean, var)
    batch_var, batch_mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
    if share == 1:
        return batch_mean, batch_var
    return torch.lerp(mean, batch_mean, share), torch.lerp(var, batch_var, share)


def _other_norm(layer: Any, name: str, dims: dict[str, int], x: Tensor) -> Tensor:
    """GroupNorm, LayerNorm, InstanceNorm, RMSNorm, a user's own: only Delta matters."""
    forward = type(layer).forward
    rows = {one: getattr(layer, one) for one in dims}
    if all(value.dim() == dims[one] for one, value in rows.items()):
        return forward(layer, x)  # type: ignore[no-any-return]
    if isinstance(layer, nn.GroupNorm) and not x.requires_grad:
        x = x.contiguous()  # torch 2.13 crashes in the backward of channels last without one for x

    def call_with(x: Tensor, affine: Tensors) -> Tensor:
        with _holding(layer, {one: value.to(x.dtype) for one, value in affine.items()}):
            return forward(layer, x)  # type: ignore[no-any-return]

    if all(len(value) == 1 for value in rows.values()):
        return call_with(x, {one: value[0] for one, value in rows.items()})
    _check_rows(name, x, *rows.values())
    # vmap, because a subclass may move the channels before it normalizes, as ConvNeXts do.
    return torch.vmap(lambda x, affine: call_with(x[None], affine)[0])(x, rows)


@contextmanager
def _holding(layer: Any, tensors: Tensors) -> Iterator[None]:
    """Give the layer other parameters and buffers for the time of a block."""
    own = layer._parameters, layer._buffers
    layer._parameters, layer._buffers = (
        values | {name: tensors[name] for name in values if name in tensors} for values in own
    )
    try:
        yield
    finally:
        layer._parameters, layer._buffers = own


def _check_rows(name: str, x: Tensor, *affine: Tensor | None) -> None:
    for rows in affine:
        if rows is not None and len(rows) not in (1, len(x)):
            raise ValueError(
                f"sample-wise adaptation needs the {len(rows)} inputs in the first dimension, got "
                f"{tuple(x.shape)} at layer {name!r}; use affine='batch'"
            )


def channel_affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return x * scale + shift for x (N, C, ...) and scale, shift (1 or N, C).

    >>> channel_affine(torch.ones(2, 1, 2), torch.tensor([[1.0], [2.0]]), torch.zeros(2, 1))[:, 0, 0]
    tensor([1., 2.])
    """
    if torch.compiler.is_compiling():
        return (x * _as_channels(scale, x) + _as_channels(shift, x)).to(x.dtype)
    is_mixed = x.dtype != scale.dtype and x.device.type == "cpu"
    if len(scale) > 1 and not is_mixed:
        return _ChannelAffine.apply(x, scale, shift)  # type: ignore[no-any-return,no-untyped-call]
    # The kernel of torch scales half precision by float32 without copying x, but has no rows for inputs.
    pieces = x.split(len(x) // len(scale))
    none, unit = torch.zeros_like(scale[0]), torch.ones_like(scale[0])
    scaled = [
        F.batch_norm(piece, none, unit, weight, bias, eps=0.0)
        for piece, weight, bias in zip(pieces, scale, shift, strict=True)
    ]
    return scaled[0] if len(scaled) == 1 else torch.cat(scaled)


class _ChannelAffine(torch.autograd.Function):
    """One pass forward and as few as possible backward: half of what dent adds to the convolutions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        exact = x.to(scale.dtype)  # in half precision a small Delta would be lost
        return torch.addcmul(_as_channels(shift, x), exact, _as_channels(scale, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, scale = ctx.saved_tensors
        grad, exact = grads[0].to(scale.dtype), x.to(scale.dtype)
        product = grad_x = grad_scale = grad_shift = None
        if ctx.needs_input_grad[1]:
            product = grad * exact
            grad_scale = _sum_channels(product, scale)
        if ctx.needs_input_grad[2]:
            grad_shift = _sum_channels(grad, scale)
        if ctx.needs_input_grad[0]:
            # Large tensors cost more to allocate than to compute: reuse one if no graph is built, and
            # if it is not the gradient of the scale itself, as it is for inputs (N, C).
            out = None if torch.is_grad_enabled() or grad_scale is product else product
            grad_x = torch.mul(grad, _as_channels(scale, x), out=out).to(x.dtype)
        return grad_x, grad_scale, grad_shift


def _as_channels(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(rows.shape + (1,) * (x.dim() - 2))


def _sum_channels(values: Tensor, like: Tensor) -> Tensor:
    rows = values.sum(tuple(range(2, values.dim()))) if values.dim() > 2 else values
    return rows.sum(0, keepdim=True) if len(like) == 1 else rows
