"""bfloat16 products computed wide: the same numbers as plain ones, forward and backward, and only where asked."""

import torch

from kvshot import products
from kvshot.products import SMALL, WideProducts, fast_products


def product(x, w, bias):
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.nn.functional.linear(x, w, bias)
        return y @ y.transpose(-1, -2)


def run(wide):
    torch.manual_seed(0)
    x, w = torch.randn(2, SMALL, 48), torch.randn(32, 48)
    bias = torch.randn(32)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    with WideProducts() if wide else torch.enable_grad():
        out = product(*leaves)
        out.float().square().mean().backward()
    return [out, *(t.grad for t in leaves)]


def test_the_same_numbers_up_to_the_rounding_of_bf16():
    for plain, wide in zip(run(False), run(True), strict=True):
        assert plain.dtype == wide.dtype and plain.shape == wide.shape
        error = (plain.float() - wide.float()).norm() / plain.float().norm()
        assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_one_rounding_of_the_exact_product():
    torch.manual_seed(0)
    a, b = torch.randn(SMALL, 300).bfloat16(), torch.randn(300, 40).bfloat16()
    with WideProducts():
        wide = a @ b
    exact = a.double() @ b.double()
    # half a unit in the last place, and float32's own sum
    assert ((wide.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


def test_few_rows_and_float32_are_left_alone():
    torch.manual_seed(0)
    a, b = torch.randn(SMALL - 1, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    c = torch.randn(SMALL, 64)
    plain = a @ b, c @ c.T
    with WideProducts():
        wide = a @ b, c @ c.T
    assert all(torch.equal(x, y) for x, y in zip(plain, wide, strict=True))


def test_only_where_bf16_is_slow(monkeypatch):
    monkeypatch.setattr(products, "slow_bf16", lambda: True)
    assert isinstance(fast_products(), WideProducts)
    monkeypatch.setattr(products, "slow_bf16", lambda: False)
    assert not isinstance(fast_products(), WideProducts)
