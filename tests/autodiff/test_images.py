"""A whole model over images, differentiated, against torch's autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from test_differentiate import differentiated, run
from torch import nn


class Images(nn.Module):
    """Convolutions of every kind that models have, pooling, resizing, a known batch norm, and words that are looked up.

    Sizes are odd; strides leave a rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 6, 5, 2, 2), nn.Conv2d(6, 6, 3, padding=1, dilation=1, groups=6)
        self.norm, self.up = nn.BatchNorm2d(6), nn.ConvTranspose2d(6, 5, 3, 2, 1, output_padding=1)
        self.words = nn.Embedding(127, 5)
        self.last = nn.Conv1d(5, 3, 3, 2, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.norm(self.first(x)), 3, 2, 1)
        x = self.up(F.avg_pool2d(self.deep(x), 3, 1, 1, count_include_pad=False))
        x = F.interpolate(x, (7, 9), mode="bilinear", align_corners=False)
        x = F.adaptive_avg_pool2d(x, (5, 2)).flatten(2) + F.adaptive_max_pool2d(x, (2, 5)).flatten(2)
        return (self.last(x * self.words(ids).transpose(1, 2)) ** 2).mean()


def test_a_model_of_images_and_words_has_torch_s_gradients() -> None:
    torch.manual_seed(0)
    model = Images().double().eval()
    model.norm.running_mean = torch.randn(6, dtype=torch.float64)
    args = torch.randn(3, 3, 23, 17, dtype=torch.float64), torch.randint(0, 127, (3, 10))
    imported, module = differentiated(model, args)
    found = run(imported, module, *args)
    loss = model(*args)
    loss.backward()
    torch.testing.assert_close(found["output"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[f"{imported.names[name]}.grad"], parameter.grad, rtol=1e-10, atol=1e-12)
