"""A transformer that predicts the next character, and low-rank adapters for it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Every character looks at those before it and at itself."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.of_weights, self.of_output = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Dropout of the attention's weights follows the mode of ``of_weights``, so that MC dropout can switch it."""
        count, length, width = x.shape
        parts = self.inputs(x).chunk(3, dim=-1)
        query, key, value = (part.view(count, length, self.heads, -1).transpose(1, 2) for part in parts)
        dropped = self.of_weights.p if self.of_weights.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        return self.of_output(self.output(seen.transpose(1, 2).reshape(count, length, width)))


class Block(nn.Module):
    """Attention, then two layers for each character by itself; both are added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.attention = nn.LayerNorm(width, bias=False), Attention(width, heads, dropout)
        self.before_layers = nn.LayerNorm(width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised first, as GPT-2 does."""
        x = x + self.attention(self.before_attention(x))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.before_layers(x)))))


class CharacterGPT(nn.Module):
    """GPT-2's shape over characters. 6 layers of 384 with 6 heads and 65 characters have 10.8 million weights."""

    def __init__(
        self, characters: int, length: int, layers: int = 6, width: int = 384, heads: int = 6, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for block in self.blocks:  # what is added to the stream, so that its size does not grow with the depth
            for layer in (block.attention.output, block.narrow):  # type: ignore[union-attr]
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * layers))  # type: ignore[arg-type, union-attr]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character, for every character of ``x``, of shape (texts, length)."""
        h = self.dropout(self.character(x) + self.place.weight[: x.shape[1]])
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def next_character_loss(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over all characters of a batch."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Adapted(nn.Module):
    """A linear layer that stays as it is, plus a trained product of two narrow ones (LoRA; Hu et al., 2021).

    W·x + 2·B·A·x, where A is random and B zero at first, so that training starts at W.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Of the shape of the base's output."""
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


def adapt(model: CharacterGPT, rank: int) -> CharacterGPT:
    """Freeze the model and give an adapter to every linear layer of its blocks; the same model comes back."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for block in model.blocks:
        for owner, name in (
            (block.attention, "inputs"),
            (block.attention, "output"),
            (block, "wide"),
            (block, "narrow"),
        ):
            setattr(owner, name, Adapted(getattr(owner, name), rank))
    return model
