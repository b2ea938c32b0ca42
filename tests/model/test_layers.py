import pytest
import torch
import torch.nn.functional as F

from flashtrain.model.layers import gelu


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gelu_is_the_tanh_form_to_a_rounding(dtype, compiled):
    torch.compiler.reset()
    x = torch.cat([torch.linspace(-12, 12, 2001), torch.tensor([-1e4, -0.0, 1e4])]).to(dtype).requires_grad_()
    y = (torch.compile(gelu, backend="aot_eager", fullgraph=True) if compiled else gelu)(x)
    wide = x.detach().double().requires_grad_()
    exact = F.gelu(wide, approximate="tanh")
    assert y.dtype == dtype
    # Absolute, since 1 + tanh u and 1 - tanh^2 u cancel: an eps times |x| and |x du/dx|, while it is more than an eps.
    computed_in = torch.promote_types(dtype, torch.float32)
    rounding = {"rtol": torch.finfo(dtype).eps, "atol": 64 * torch.finfo(computed_in).eps}
    torch.testing.assert_close(y.double(), exact, **rounding)
    gradients = (torch.autograd.grad(value.sum(), of)[0].double() for value, of in ((y, x), (exact, wide)))
    torch.testing.assert_close(*gradients, **rounding)
