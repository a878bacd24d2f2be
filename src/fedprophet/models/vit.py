"""The vision transformer (Dosovitskiy et al., 2021), with torchvision's parameter names."""

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.errors import ModelError
from fedprophet.models.checks import check_fraction, check_positive, is_small
from fedprophet.models.registry import model

EPSILON = 1e-6
MOST_BLOCKS = 1000


@dataclass(frozen=True)
class TransformerSizes:
    """How large a transformer is, and how strongly it drops out."""

    patch: int
    dim: int
    depth: int
    heads: int
    mlp_dim: int
    dropout: float


class SelfAttention(nn.Module):
    """Multi-head self-attention, spelled out so that it can be traced and its FLOPs counted."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.head_dim = sizes.dim // sizes.heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * sizes.dim, sizes.dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * sizes.dim))
        self.out_proj = nn.Linear(sizes.dim, sizes.dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        # (N, L, 3·D) becomes three tensors of (N, heads, L, D / heads).
        split = projected.reshape(x.shape[0], x.shape[1], 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Sequential):
    """Two linear layers on each token."""

    def __init__(self, sizes: TransformerSizes) -> None:
        inner, outer = nn.Linear(sizes.dim, sizes.mlp_dim), nn.Linear(sizes.mlp_dim, sizes.dim)
        super().__init__(inner, nn.GELU(), nn.Dropout(sizes.dropout), outer, nn.Dropout(sizes.dropout))
        for linear in (inner, outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.normal_(linear.bias, std=EPSILON)


class EncoderBlock(nn.Module):
    """Attention and a token-wise network, each behind a norm and inside a shortcut."""

    def __init__(self, sizes: TransformerSizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.dim, eps=EPSILON)
        self.self_attention = SelfAttention(sizes)
        self.dropout = nn.Dropout(sizes.dropout)
        self.ln_2 = nn.LayerNorm(sizes.dim, eps=EPSILON)
        self.mlp = MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attention(self.ln_1(x)))
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Encoder(nn.Module):
    """Position embedding, blocks, and a last norm."""

    def __init__(self, tokens: int, sizes: TransformerSizes) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, sizes.dim))
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.Sequential()
        for number in range(sizes.depth):
            self.layers.add_module(f"encoder_layer_{number}", EncoderBlock(sizes))
        self.ln = nn.LayerNorm(sizes.dim, eps=EPSILON)
        nn.init.normal_(self.pos_embedding, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.ln(self.layers(self.dropout(x + self.pos_embedding)))
        return result


class VisionTransformer(nn.Module):
    """Patches and a class token through an encoder; the class token's end is classified."""

    def __init__(self, input_shape: tuple[int, int, int], classes: int, sizes: TransformerSizes) -> None:
        super().__init__()
        channels, height, width = input_shape
        self.conv_proj = nn.Conv2d(channels, sizes.dim, sizes.patch, stride=sizes.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, sizes.dim))
        self.encoder = Encoder((height // sizes.patch) * (width // sizes.patch) + 1, sizes)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(sizes.dim, classes)))
        nn.init.trunc_normal_(self.conv_proj.weight, std=(channels * sizes.patch**2) ** -0.5)
        nn.init.zeros_(self.conv_proj.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        token = self.class_token.expand(patches.shape[0], -1, -1)
        encoded = self.encoder(torch.cat([token, patches], dim=1))
        scores: Tensor = self.heads(encoded[:, 0])
        return scores


@model("vit", "vision transformer: ViT-B/16 for large images, 6 blocks of width 192 for small ones")
def build_vit(
    name: str,
    input_shape: tuple[int, int, int],
    classes: int,
    *,
    patch: int | None = None,
    dim: int | None = None,
    depth: int | None = None,
    heads: int | None = None,
    mlp_dim: int | None = None,
    dropout: float = 0.0,
) -> nn.Module:
    """Build a vision transformer: ViT-B/16 for large images, a small one for images up to 64 pixels."""
    given = {"patch": patch, "dim": dim, "heads": heads, "mlp_dim": mlp_dim}
    check_positive(name, **{option: value for option, value in given.items() if value is not None})
    check_positive(name, MOST_BLOCKS, depth=1 if depth is None else depth)
    small = is_small(input_shape)
    least = min(input_shape[1:])
    width = dim or (192 if small else 768)
    sizes = TransformerSizes(
        patch=patch if patch is not None else (4 if least >= 16 else 2) if small else 16,
        dim=width,
        depth=depth if depth is not None else 6 if small else 12,
        heads=heads if heads is not None else max(1, width // 64),
        mlp_dim=mlp_dim if mlp_dim is not None else (2 if small else 4) * width,
        dropout=dropout,
    )
    _check(input_shape, sizes)
    return VisionTransformer(input_shape, classes, sizes)


def _check(input_shape: tuple[int, int, int], sizes: TransformerSizes) -> None:
    check_fraction("vit", dropout=sizes.dropout)
    if input_shape[1] % sizes.patch or input_shape[2] % sizes.patch:
        raise ModelError(
            f"vit cannot cut images of {input_shape[1]}×{input_shape[2]} pixels into patches of {sizes.patch}: "
            "set option patch to a divisor of both sides"
        )
    if sizes.dim % sizes.heads:
        raise ModelError(f"option dim of vit ({sizes.dim}) must be a multiple of option heads ({sizes.heads})")
