import pytest
import torch

from optimizer.labels import draw, label_gradients


def test_labels_come_as_often_as_they_are_likely() -> None:
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2], [0.0, 1.0, 0.0, 0.0]])
    labels = draw(p, 4000, torch.Generator().manual_seed(0))
    for row, expected in zip(labels, p, strict=True):
        share = torch.bincount(row, minlength=4) / 4000
        # Four standard errors, sqrt(p (1 - p) / n).
        assert bool(((share - expected).abs() <= 4 * (0.25 / 4000) ** 0.5).all())
        assert bool((share[expected == 0.0] == 0.0).all())


def test_gradients_are_those_of_cross_entropy() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(1))
    found = label_gradients(logits, 3, torch.Generator().manual_seed(2))
    p = logits.softmax(-1)
    labels = draw(p, 3, torch.Generator().manual_seed(2))
    for k, gradient in enumerate(found):
        z = logits.clone().requires_grad_(True)
        torch.nn.functional.cross_entropy(z, labels[:, k], reduction="sum").backward()
        assert z.grad is not None
        torch.testing.assert_close(gradient, z.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [1, 3])
def test_a_point_at_the_very_end_is_the_last_label(vocabulary: int) -> None:
    p = torch.zeros(1, vocabulary)
    p[0, -1] = 1.0
    labels = draw(p, 100, torch.Generator().manual_seed(0))
    assert set(labels.flatten().tolist()) == {vocabulary - 1}
