"""bfloat16 products in float32 arithmetic: which ones, that the numbers stay, and only where it is asked for."""

import pytest
import torch

from kvshot import products
from kvshot.products import SMALL, WideProducts, fast_products

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def run(seen_products, rows, wide):
    """A linear map with bias and a batched product, forward and backward: results, and what the kernels saw."""
    torch.manual_seed(0)
    x, w, bias = (torch.randn(*shape).requires_grad_() for shape in ((2, rows, rows), (rows, rows), (rows,)))
    with seen_products() as seen, WideProducts() if wide else torch.enable_grad():
        with torch.autocast("cpu", BF16):
            y = torch.nn.functional.linear(x, w, bias)
            out = y @ y.transpose(-1, -2)
        out.float().square().mean().backward()
    return [out, x.grad, w.grad, bias.grad], [dtype for _, dtype in seen.products]


def test_every_large_product_is_wide_forward_and_backward(seen_products):
    plain, seen_plain = run(seen_products, SMALL, False)
    wide, seen_wide = run(seen_products, SMALL, True)
    assert len(seen_plain) == 6 and set(seen_plain) == {BF16}
    assert len(seen_wide) == 6 and set(seen_wide) == {torch.float32}
    for a, b in zip(plain, wide, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.float() - b.float()).norm() / a.float().norm() < 2 * torch.finfo(BF16).eps


def test_few_rows_are_left_alone(seen_products):
    plain, _ = run(seen_products, SMALL // 2 - 1, False)
    wide, seen = run(seen_products, SMALL // 2 - 1, True)  # the two sequences of the linear map come as one matrix
    assert set(seen) == {BF16}
    assert all(torch.equal(a, b) for a, b in zip(plain, wide, strict=True))


def test_one_rounding_of_the_exact_product():
    torch.manual_seed(0)
    a, b = torch.randn(SMALL, 300).bfloat16(), torch.randn(300, 40).bfloat16()
    with WideProducts():
        wide = a @ b
    exact = a.double() @ b.double()
    # half a unit in the last place, and float32's own sum
    assert ((wide.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


@pytest.mark.parametrize("slow", [True, False])
def test_only_bf16_on_a_cpu_that_is_slow_at_it(monkeypatch, slow):
    monkeypatch.setattr(products, "_slow_bf16", lambda: slow)
    assert isinstance(fast_products(CPU, BF16), WideProducts) == slow
    for device, dtype in ((torch.device("cuda"), BF16), (CPU, torch.float32)):
        assert not isinstance(fast_products(device, dtype), WideProducts)
