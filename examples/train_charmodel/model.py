"""A small GPT: predicts the next character from those before it.

Knows nothing of processes, devices or training.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Look back at all earlier places, then think about each place alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.after_attention = nn.Linear(width, width)
        self.before_thought = nn.LayerNorm(width)
        self.thought = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x := x + self.attend(self.before_attention(x))) + self.thought(self.before_thought(x))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.after_attention(seen.transpose(1, 2).reshape(batch, length, width))


class CharacterModel(nn.Module):
    def __init__(self, characters: int, context: int, layers: int, heads: int, width: int) -> None:
        """`context`: characters that it can look back at; `width`: numbers per character, a multiple of `heads`."""
        super().__init__()
        self.context = context
        self.character = nn.Embedding(characters, width)
        self.place = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)
        self.apply(_small)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """[batch, length] characters -> [batch, length, characters]: a score for each possible next one."""
        x = self.character(text) + self.place(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _small(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


@torch.no_grad()
def write(model: nn.Module, text: torch.Tensor, count: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """`text` [length] and `count` characters more. `generator` (on the CPU) decides which."""
    for _ in range(count):
        scores = model(text[None, -context:])[0, -1]
        chosen = torch.multinomial(F.softmax(scores.float().cpu(), 0), 1, generator=generator)
        text = torch.cat((text, chosen.to(text.device)))
    return text
