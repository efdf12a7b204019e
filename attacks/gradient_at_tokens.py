"""Gradients of a plain vision transformer's loss at its tokens, and how they change with the tokens.

A search that compares gradients at the model's entrance needs no other: those at the tokens, and in the search's own
backward pass the loss's Hessian times one direction. Torch finds that by differentiating its backward pass, one
elementary operation after another. Here four passes through the network are written out: forward, ``back`` for the
gradient, then ``push``, how everything changes in the direction, and ``pull``, how the gradient does. Each part of the
network keeps what the next pass reads; scales and shifts of layer norms are multiplied into the layers that read them.

The gradient of a linear layer's weight is a product of what goes into the layer and of the slope at what comes out. Who
compares such gradients asks for both (``Run.layers``): after ``back``, and how they change after ``pull``. How what is
made of them changes with the tokens takes one ``push`` and ``pull`` too, where slopes are added layer by layer.
"""

from math import log, pi
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward
ABSENT = ("patch_embed.norm", "pos_drop", "patch_drop", "norm_pre", "fc_norm", "head_drop")
SOFTMAX_BACKWARD = torch.ops.aten._softmax_backward_data
HEAD = "head"
Layers = dict[str, tuple[Tensor, Tensor]]  # by name: of what goes in, and of the slope at what comes out
NOTHING: Layers = {}


def is_plain(backbone: nn.Module) -> bool:
    """Say whether the network is made of the parts that are written out here.

    These are a class token that alone is classified, position embeddings added before pre-norm blocks of attention and
    an MLP with exact GELU, and layer norms with scale and shift. Nothing is drawn at random.

    Args:
        backbone: A network, in evaluation mode if it is to be plain.
    """
    if not isinstance(backbone, VisionTransformer) or backbone.training or backbone.global_pool != "token":
        return False
    embedding = backbone.patch_embed
    absent = (
        embedding.norm,
        backbone.pos_drop,
        backbone.patch_drop,
        backbone.norm_pre,
        backbone.fc_norm,
        backbone.head_drop,
    )
    odd = backbone.no_embed_class or backbone.dynamic_img_size or backbone.attn_pool is not None
    prefix = backbone.num_prefix_tokens == 1 and backbone.cls_token is not None
    ends = _is_norm(backbone.norm) and isinstance(backbone.head, nn.Linear) and not odd and prefix
    return (
        ends and all(_is_idle(module) for module in absent) and all(_is_plain_block(block) for block in backbone.blocks)
    )


def _is_plain_block(block: Any) -> bool:
    if type(block) is not Block:
        return False
    attention, mlp = block.attn, block.mlp
    absent = (block.ls1, block.ls2, attention.q_norm, attention.k_norm, attention.norm, attention.attn_drop, mlp.norm)
    linear = (attention.qkv, attention.proj, mlp.fc1, mlp.fc2)
    exact = isinstance(mlp.act, nn.GELU) and mlp.act.approximate == "none" and attention.gate is None
    whole = all(isinstance(layer, nn.Linear) and layer.bias is not None for layer in linear)
    idle = all(_is_idle(module) for module in absent)
    return exact and whole and idle and _is_norm(block.norm1) and _is_norm(block.norm2)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) and module.bias is not None


def _is_idle(module: Any) -> bool:
    return isinstance(module, (nn.Identity, nn.Dropout))  # of networks that are not training


class PlainTransformer:
    """A network for which ``is_plain`` holds, without its embedding; its weights are copied.

    Args:
        backbone: A vision transformer of timm's.
    """

    def __init__(self, backbone: Any) -> None:
        last = len(backbone.blocks) - 1
        self._blocks = [
            _Weights(block, reads=1 if place == last else None) for place, block in enumerate(backbone.blocks)
        ]
        self._head, self._head_bias = _after_norm(backbone.norm, backbone.head)
        self._eps, self._affine = backbone.norm.eps, _affine(backbone.norm)

    def gradient(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradient at the tokens of a cross-entropy times a constant; differentiable once.

        Args:
            tokens: (candidates, batch, tokens, dim), what enters the first block.
            targets: (candidates, batch, classes), distributions.

        Returns:
            The gradient of each candidate's mean over its batch, times the candidate's constant, like ``tokens``; and
            the constants (candidates,): one over the norm of the cross-entropies' gradients at the logits.
        """
        gradients: tuple[Tensor, Tensor] = _Gradient.apply(tokens, targets, self)
        return gradients

    def run(self, tokens: Tensor, *, keeps: bool = False) -> "Run":
        """Run forward through the network.

        Args:
            tokens: (pictures, tokens, dim), what enters the first block.
            keeps: Whether ``Run.layers`` will be asked for.
        """
        parts = []
        for place, block in enumerate(self._blocks):
            parts.append(_BlockRun(block, tokens, f"blocks.{place}", keeps=keeps))
            tokens = parts[-1].result
        return Run(parts, _Norm(tokens[:, 0], self._eps), self._head, self._head_bias, self._affine)


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, targets: Tensor, network: PlainTransformer) -> tuple[Tensor, Tensor]:
        ctx.run = network.run(tokens.flatten(0, 1))
        probabilities = ctx.run.logits.softmax(dim=-1)
        slopes = (probabilities.view_as(targets) - targets).flatten(1)
        scale = 1 / slopes.norm(dim=1).clamp(min=torch.finfo(slopes.dtype).tiny)
        ctx.weights = (scale / tokens.shape[1]).repeat_interleave(tokens.shape[1])[:, None]
        ctx.probabilities = probabilities
        ctx.mark_non_differentiable(scale)
        slope = ctx.run.back(ctx.weights * slopes.view_as(probabilities))
        return slope.view_as(tokens), scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, direction: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        moved = SOFTMAX_BACKWARD(ctx.run.push(direction.flatten(0, 1)), ctx.probabilities, -1, ctx.probabilities.dtype)
        return ctx.run.pull(ctx.weights * moved).view_as(direction), None, None


class Run:
    """One forward pass through blocks, norm and head."""

    def __init__(
        self, parts: "list[_BlockRun]", norm: "_Norm", head: Tensor, bias: Tensor, affine: tuple[Tensor, Tensor]
    ) -> None:
        """End a pass through blocks with a norm, of which ``affine`` is scale and shift, and a head that has these."""
        self._parts, self._norm, self._head, self._affine = parts, norm, head, affine
        self.logits = torch.addmm(bias, norm.result, head.T)

    def back(self, slope: Tensor) -> Tensor:
        """Propagate a slope at the logits back to the tokens.

        Args:
            slope: (pictures, classes).

        Returns:
            (pictures, tokens, dim).
        """
        self._seen = torch.addcmul(self._affine[1], self._norm.result, self._affine[0]), slope
        slope = self._norm.back(slope @ self._head)[:, None]
        for part in reversed(self._parts):
            slope = part.back(slope)
        return slope

    def push(self, direction: Tensor, added: Layers = NOTHING) -> Tensor:
        """Compute the change of the logits with the tokens and with additions to the outputs of layers.

        Args:
            direction: Change of the tokens, (pictures, tokens, dim).
            added: Additions by layer; the second of each pair is used.
        """
        for part in self._parts:
            direction = part.push(direction, added)
        self._pushed = self._norm.push(direction[:, 0])
        return _more(self._pushed @ self._head.T, added, HEAD, 1)

    def pull(self, change: Tensor, added: Layers = NOTHING) -> Tensor:
        """Compute the change of the result of ``back`` in the direction of ``push``.

        Args:
            change: Change of the slope at the logits, (pictures, classes).
            added: Additions to the slopes at the inputs of layers; the first of each pair is used.
        """
        self._seen = self._pushed * self._affine[0], change
        slope = self._norm.pull(_more(change @ self._head, added, HEAD, 0, self._affine[0]))[:, None]
        for part in reversed(self._parts):
            slope = part.pull(slope, added)
        return slope

    def layers(self) -> Layers:
        """Return inputs and slopes of linear layers as the last ``back`` left them, or their changes after ``pull``."""
        pairs = {HEAD: (self._seen[0][:, None], self._seen[1][:, None])}
        for part in self._parts:
            pairs |= part.layers()
        return pairs


class _Weights:
    """The weights of a block, of whose results the first ``reads`` are read; all if that is None."""

    def __init__(self, block: Any, *, reads: int | None) -> None:
        self.reads, self.heads, self.eps = reads, block.attn.num_heads, (block.norm1.eps, block.norm2.eps)
        self.qkv, self.qkv_bias = _after_norm(block.norm1, block.attn.qkv)
        self.query_scale = torch.ones_like(self.qkv_bias)
        self.query_scale[: block.attn.attn_dim] = block.attn.scale
        self.qkv, self.qkv_bias = self.qkv * self.query_scale[:, None], self.qkv_bias * self.query_scale
        self.mixed, self.mixed_bias = block.attn.proj.weight.detach(), block.attn.proj.bias.detach()
        self.wide, self.wide_bias = _after_norm(block.norm2, block.mlp.fc1)
        self.narrow, self.narrow_bias = block.mlp.fc2.weight.detach(), block.mlp.fc2.bias.detach()
        self.affine = _affine(block.norm1), _affine(block.norm2)


def _more(values: Tensor, added: Layers, name: str, which: int, scale: Tensor | None = None) -> Tensor:
    """Add what ``added`` holds for a layer, if anything."""
    if name not in added:
        return values
    more = added[name][which].reshape(values.shape)
    return values + more if scale is None else torch.addcmul(values, more, scale)


def _affine(norm: Any) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a norm."""
    return norm.weight.detach(), norm.bias.detach()


def _after_norm(norm: Any, layer: Any) -> tuple[Tensor, Tensor]:
    """Merge norm and layer into weight and bias for normalised values."""
    weight = layer.weight.detach()
    return weight * norm.weight.detach(), torch.addmv(layer.bias.detach(), weight, norm.bias.detach())


class _BlockRun:
    def __init__(self, weights: _Weights, tokens: Tensor, name: str, *, keeps: bool) -> None:
        self._weights, self._keeps = weights, keeps
        self._names = tuple(f"{name}.{layer}" for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"))
        w = weights
        self._read, self._unread = slice(w.reads), tokens.shape[1] - (w.reads or tokens.shape[1])
        norm1 = _Norm(tokens, w.eps[0])
        self._attention = _Attention(F.linear(norm1.result, w.qkv, w.qkv_bias), w.heads, self._read)
        between = F.linear(self._attention.result, w.mixed, w.mixed_bias).add_(tokens[:, self._read])
        norm2 = _Norm(between, w.eps[1])
        self._gelu = _Gelu(F.linear(norm2.result, w.wide, w.wide_bias))
        self.result = F.linear(self._gelu.result, w.narrow, w.narrow_bias).add_(between)
        self._norms = norm1, norm2

    def back(self, slope: Tensor) -> Tensor:
        w, (norm1, norm2) = self._weights, self._norms
        inner = self._gelu.back(slope @ w.narrow)
        between = norm2.back(inner @ w.wide) + slope
        entering = self._attention.back(between @ w.mixed)
        if self._keeps:
            first, second = (
                torch.addcmul(shift, run.result, scale)
                for run, (scale, shift) in zip(self._norms, w.affine, strict=True)
            )
            self._inputs = first, self._attention.result, second, self._gelu.result
            self._slopes = entering, between, inner, slope
        return norm1.back(entering @ w.qkv) + self._padded(between)

    def push(self, direction: Tensor, added: Layers) -> Tensor:
        w, (norm1, norm2), (qkv, proj, fc1, fc2) = self._weights, self._norms, self._names
        first = norm1.push(direction)
        mixed = self._attention.push(_more(F.linear(first, w.qkv), added, qkv, 1, w.query_scale))
        between = _more(F.linear(mixed, w.mixed), added, proj, 1).add_(direction[:, self._read])
        second = norm2.push(between)
        inner = self._gelu.push(_more(F.linear(second, w.wide), added, fc1, 1))
        if self._keeps:
            self._inputs = first * w.affine[0][0], mixed, second * w.affine[1][0], inner
        return _more(F.linear(inner, w.narrow), added, fc2, 1).add_(between)

    def pull(self, change: Tensor, added: Layers) -> Tensor:
        w, (norm1, norm2), (qkv, proj, fc1, fc2) = self._weights, self._norms, self._names
        inner = self._gelu.pull(_more(change @ w.narrow, added, fc2, 0))
        between = norm2.pull(_more(inner @ w.wide, added, fc1, 0, w.affine[1][0])).add_(change)
        entering = self._attention.pull(_more(between @ w.mixed, added, proj, 0))
        if self._keeps:
            self._slopes = entering, between, inner, change
        slope = norm1.pull(_more(entering @ w.qkv, added, qkv, 0, w.affine[0][0]))
        return slope.add_(self._padded(between))

    def layers(self) -> Layers:
        entering, *later = self._slopes
        slopes = entering * self._weights.query_scale, *later
        return dict(zip(self._names, zip(self._inputs, slopes, strict=True), strict=True))

    def _padded(self, values: Tensor) -> Tensor:
        return F.pad(values, (0, 0, 0, self._unread)) if self._unread else values


class _Norm:
    """A layer norm without scale and shift.

    Its derivative J = r (1 - 1 1^T / n - y y^T / n), with results y and r one over the spread, is symmetric. That of
    s^T J g by the values is -r (mean(s J g) y + mean(g y) J s + mean(s y) J g).
    """

    def __init__(self, values: Tensor, eps: float) -> None:
        self._values = values.contiguous()
        self.result, self._mean, self._rate = torch.native_layer_norm(self._values, values.shape[-1:], None, None, eps)

    def back(self, slope: Tensor) -> Tensor:
        self._slope = slope
        self._back = self._derivative(slope)
        return self._back

    def push(self, direction: Tensor) -> Tensor:
        self._pushed = self._derivative(direction)
        rate = self._rate / -direction.shape[-1]
        products = (direction, self._back), (self._slope, self.result), (direction, self.result)
        factors = [torch.linalg.vecdot(first, second)[..., None].mul_(rate) for first, second in products]
        self._bent = (self.result * factors[0]).addcmul_(self._pushed, factors[1]).addcmul_(self._back, factors[2])
        return self._pushed

    def pull(self, change: Tensor) -> Tensor:
        return self._derivative(change).add_(self._bent)

    def _derivative(self, slope: Tensor) -> Tensor:
        shape, outputs = slope.shape[-1:], [True, False, False]
        derivative: Tensor = NORM_BACKWARD(
            slope.contiguous(), self._values, shape, self._mean, self._rate, None, None, outputs
        )[0]
        return derivative


class _Gelu:
    """The activation x times the normal distribution's Phi(x); its second derivative is the density times 2 - x^2."""

    def __init__(self, values: Tensor) -> None:
        self._values, self.result = values, F.gelu(values)
        self._rate: Tensor = torch.ops.aten.gelu_backward(values.new_ones(()).expand_as(values), values)

    def back(self, slope: Tensor) -> Tensor:
        self._slope = slope
        return slope * self._rate

    def push(self, direction: Tensor) -> Tensor:
        """Push a direction forward; its memory is used up."""
        square = self._values * self._values
        density = (square * -0.5).sub_(log(2 * pi) / 2).exp_()
        self._bent: Tensor = torch.sub(2, square, out=square).mul_(density).mul_(self._slope).mul_(direction)
        return direction.mul_(self._rate)

    def pull(self, change: Tensor) -> Tensor:
        return torch.addcmul(self._bent, change, self._rate)


class _Attention:
    """Softmax of Q K^T, times V, of (pictures, tokens, 3 dim): scaled queries, keys, values. Some queries are read."""

    def __init__(self, values: Tensor, heads: int, read: slice) -> None:
        self._heads, self._read, self._tokens = heads, read, values.shape[1]
        self._query, self._key, self._value = self._split(values)
        self._weights = (self._query @ self._key.mT).softmax(dim=-1)
        self.result = self._together([self._weights @ self._value])

    def back(self, slope: Tensor) -> Tensor:
        (self._slope,) = self._apart(slope, 1)
        self._outer = self._slope @ self._value.mT
        self._inner = self._through_softmax(self._outer)
        return self._merged(self._inner @ self._key, self._inner.mT @ self._query, self._weights.mT @ self._slope)

    def push(self, direction: Tensor) -> Tensor:
        self._query_moved, self._key_moved, self._value_moved = self._split(direction)
        scores = torch.baddbmm(self._query_moved @ self._key.mT, self._query, self._key_moved.mT)
        self._weights_moved = self._through_softmax(scores)
        return self._together([torch.baddbmm(self._weights @ self._value_moved, self._weights_moved, self._value)])

    def pull(self, change: Tensor) -> Tensor:
        (change,) = self._apart(change, 1)
        outer = torch.baddbmm(change @ self._value.mT, self._slope, self._value_moved.mT)
        inner = self._through_softmax(outer)
        # The rest of the change of P (S - <S, P>), with S = outer, through the one of P.
        centre = torch.linalg.vecdot(self._outer, self._weights)[..., None]
        shift = torch.linalg.vecdot(self._outer, self._weights_moved)[..., None]
        inner.addcmul_(self._outer - centre, self._weights_moved).addcmul_(self._weights, shift, value=-1)
        return self._merged(
            torch.baddbmm(inner @ self._key, self._inner, self._key_moved),
            torch.baddbmm(inner.mT @ self._query, self._inner.mT, self._query_moved),
            torch.baddbmm(self._weights.mT @ change, self._weights_moved.mT, self._slope),
        )

    def _through_softmax(self, slope: Tensor) -> Tensor:
        scores: Tensor = SOFTMAX_BACKWARD(slope, self._weights, -1, slope.dtype)
        return scores

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._apart(values, 3)
        return query[:, self._read], key, value

    def _merged(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        unread = self._tokens - query.shape[1]
        return self._together([F.pad(query, (0, 0, 0, unread)) if unread else query, key, value])

    def _apart(self, values: Tensor, count: int) -> Tensor:
        """Split (pictures, tokens, count * dim) into (count, pictures * heads, tokens, dim of a head)."""
        pictures, tokens, _ = values.shape
        parts = values.view(pictures, tokens, count, self._heads, -1).permute(2, 0, 3, 1, 4)
        return parts.reshape(count, pictures * self._heads, tokens, -1)

    def _together(self, parts: list[Tensor]) -> Tensor:
        """Join heads and parts again, the inverse of ``_apart``."""
        rows = [part.view(-1, self._heads, *part.shape[1:]).transpose(1, 2) for part in parts]
        return torch.stack(rows, dim=2).flatten(2)
