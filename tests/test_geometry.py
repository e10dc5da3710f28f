"""The measures against whole Jacobians in float64, and where they have no value."""

import pytest
import torch
from torch import nn

import normalign


def tanh_net(inputs=6, outputs=4):
    return nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, outputs)).double()


def whole_jacobian(model, x):
    return torch.func.vmap(torch.func.jacrev(model))(x)


MEASURES = {
    "normal_alignment": normalign.normal_alignment,
    "centroid_alignment": normalign.centroid_alignment,
    "effective_rank": normalign.effective_rank,
    "local_robustness": normalign.local_robustness,
}


@pytest.mark.parametrize(("inputs", "outputs"), [(6, 4), (3, 5), (4, 4), (6, 1)])
@pytest.mark.parametrize("block", [None, 1, 3, 100])
def test_measures_equal_the_definitions(inputs, outputs, block):
    model, x = tanh_net(inputs, outputs), torch.randn(7, inputs, dtype=torch.float64)
    jacobian = whole_jacobian(model, x)
    unit = x / x.norm(dim=1, keepdim=True)
    _, s, vh = torch.linalg.svd(jacobian)
    close = dict(rtol=1e-9, atol=1e-12)  # float64 throughout; the Gram matrix squares the condition
    torch.testing.assert_close(
        normalign.normal_alignment(model, x, block=block),
        (vh[:, 0] * unit).sum(1).abs(),
        **close,
    )
    rank = s.sum(1) ** 2 / (s**2).sum(1)
    torch.testing.assert_close(normalign.effective_rank(model, x, block=block), rank, **close)
    torch.testing.assert_close(
        normalign.effective_rank(model, x, normalised=True), rank / min(inputs, outputs), **close
    )
    centroid = jacobian.sum(1)
    torch.testing.assert_close(normalign.centroid(model, x), centroid, **close)
    torch.testing.assert_close(
        normalign.centroid_alignment(model, x),
        torch.cosine_similarity(centroid, x, eps=0),
        **close,
    )


@pytest.mark.parametrize("block", [None, 2])
def test_local_robustness_is_the_distance_to_the_boundary_of_an_affine_model(block):
    model, x = nn.Linear(5, 3).double(), torch.randn(8, 5, dtype=torch.float64)
    radius = normalign.local_robustness(model, x, block=block)
    logits = model(x)
    own = logits.argmax(1)
    # Moving by the radius, straight to the nearest boundary, makes two logits equal.
    for i in range(8):
        gaps = []
        for k in range(3):
            if k != own[i]:
                w = model.weight[own[i]] - model.weight[k]
                moved = model(x[i] - radius[i] * w / w.norm())
                gaps.append((moved[own[i]] - moved[k]).abs())
        assert min(gaps) < 1e-12
    other = (own + 1) % 3
    assert (normalign.local_robustness(model, x, other, block=block) < 0).all()


def test_local_robustness_of_one_output():
    model, x = nn.Linear(5, 1).double(), torch.randn(4, 5, dtype=torch.float64)
    expected = model(x).abs().squeeze(1) / model.weight.norm()
    torch.testing.assert_close(normalign.local_robustness(model, x), expected)


@pytest.mark.parametrize("name", MEASURES)
def test_no_nan_where_the_jacobian_is_zero(name):
    dead = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    with torch.no_grad():
        dead[0].bias.fill_(-100.0)
        dead[2].bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    value = MEASURES[name](dead, torch.randn(6, 4))
    expected = torch.inf if name == "local_robustness" else 0.0
    assert torch.equal(value, torch.full((6,), expected))
    with torch.no_grad():
        dead[2].bias.zero_()  # no margin either
    assert torch.equal(MEASURES[name](dead, torch.randn(6, 4)), torch.zeros(6))
    # x = 0 has no direction.
    if "alignment" in name:
        assert torch.equal(MEASURES[name](nn.Linear(4, 3), torch.zeros(2, 4)), torch.zeros(2))


@pytest.mark.parametrize("name", MEASURES)
def test_scale_does_not_matter_to_directions(name):
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    before = MEASURES[name](model, x)
    with torch.no_grad():
        model.weight.mul_(1e-30)
        model.bias.mul_(1e-30)
    # Squares would underflow in float32: only the rounding of the scaling itself may show.
    torch.testing.assert_close(MEASURES[name](model, x), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MEASURES)
def test_nan_weights_stay_visible_in_their_sample_only(name):
    class NanForTheSecond(nn.Module):
        def forward(self, x):
            factor = torch.ones(len(x), 1)
            factor[torch.isclose(x[:, 0], torch.tensor(7.0))] = torch.nan
            return x * factor

    x = torch.randn(3, 4)
    x[1, 0] = 7.0
    value = MEASURES[name](NanForTheSecond(), x, **({} if "centroid" in name else {"block": 3}))
    assert torch.isnan(value).tolist() == [False, True, False]


def test_nothing_of_the_model_changes():
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)
    )
    model[3].eval()
    modes = [m.training for m in model.modules()]
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(8, 4)
    x0, state = x.clone(), torch.get_rng_state()
    with torch.no_grad():
        values = [measure(model, x) for measure in MEASURES.values()]
        assert not torch.is_grad_enabled()
    assert torch.equal(x, x0)
    assert not x.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(v.requires_grad for v in values)


def test_modes_are_restored_after_an_error():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    with pytest.raises(RuntimeError):
        normalign.effective_rank(model, torch.randn(2, 5))
    assert all(m.training for m in model.modules())


def test_images_dict_outputs_and_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()
    head = nn.Linear(8, 3).double()
    x = torch.randn(4, 5, 8, dtype=torch.float64)

    def forward(model, x):
        return {"logits": head(model(x).mean(1)), "other": None}

    layer.eval()
    jacobian = torch.stack(
        [
            torch.autograd.functional.jacobian(
                lambda a: forward(layer, a)["logits"][0], x[i : i + 1]
            )
            for i in range(4)
        ]
    ).reshape(4, 3, -1)
    s = torch.linalg.svdvals(jacobian)
    layer.train()
    rank = normalign.effective_rank(layer, x, forward=forward, output="logits")
    torch.testing.assert_close(rank, s.sum(1) ** 2 / (s**2).sum(1))
    assert normalign.centroid(nn.Conv2d(2, 3, 3), torch.randn(2, 2, 5, 5)).shape == (2, 2, 5, 5)


def test_half_precision_is_measured_in_float32():
    value = normalign.effective_rank(nn.Linear(4, 3).bfloat16(), torch.randn(2, 4).bfloat16())
    assert value.dtype is torch.float32


def test_bad_input():
    model = nn.Linear(4, 3)
    with pytest.raises(TypeError, match="x must have a floating-point dtype"):
        normalign.normal_alignment(model, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one sample"):
        normalign.effective_rank(model, torch.zeros(0, 4))
    with pytest.raises(ValueError, match="block must be an integer of at least 1, got 0"):
        normalign.effective_rank(model, torch.zeros(2, 4), block=0)
    with pytest.raises(ValueError, match=r"y must have shape \(2\)"):
        normalign.local_robustness(model, torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(ValueError, match="y must hold classes 0 to 2, got 0 to 3"):
        normalign.local_robustness(model, torch.zeros(2, 4), torch.tensor([0, 3]), block=2)
    with pytest.raises(ValueError, match="no gradient path"):
        normalign.centroid(lambda x: x.detach(), torch.randn(2, 4))
