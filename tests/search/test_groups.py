"""The largest product of each group of columns, beside that of all products."""

from __future__ import annotations

import pytest
import torch

from hardneg.search import triton_groups as triton_groups
from hardneg.search.exact import largest_of_groups
from support.kernel_inputs import DEVICE


@pytest.mark.usefixtures("triton_can_run")
@pytest.mark.parametrize(("rows", "columns", "dim"), [(5, 70, 8), (130, 2100, 128), (3, 40, 200), (1, 7, 3)])
def test_groups_have_the_largest_of_their_products(rows: int, columns: int, dim: int) -> None:
    random = torch.Generator().manual_seed(0)
    a = torch.randn(rows, dim, generator=random).bfloat16().to(DEVICE)
    b = torch.randn(columns, dim, generator=random).bfloat16().to(DEVICE)
    found = triton_groups.largest_of_groups(a, b, 16)
    width = -(-columns // 16)
    products = torch.nn.functional.pad(a.float() @ b.float().T, (0, 16 * width - columns), value=-torch.inf)
    right = products.view(rows, 16, width).amax(1)
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(largest_of_groups(a, b, 16).float(), right, rtol=0.01, atol=0.01)
