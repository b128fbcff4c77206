"""The bound that a GEMM must meet, and the share of it that a result used.

|ours - ref| <= |stock - ref| + sqrt(K) * eps32 * (|A| |B|), elementwise; ref in float64, stock is
torch's own result in the same dtype: as accurate as what it replaces, plus the order of addition.
The interpreter rounds bf16 stores otherwise than torch: one ulp of the reference is added there.
"""

import torch

EPS32 = torch.finfo(torch.float32).eps
INTERPRETED = {"TRITON_INTERPRET": "1"}  # read when the kernels are imported: for run_ranks(env=)


def limit_of(a, b, stock, scale=1.0):
    """The limit for stock ~ (a @ b.T) * scale; a [M, K], b [N, K]; scale broadcasts to [M, N]."""
    ref = a.double() @ b.double().T * scale
    magnitude = a.double().abs() @ b.double().abs().T * scale
    limit = (stock.double() - ref).abs() + a.size(1) ** 0.5 * EPS32 * magnitude
    if stock.dtype == torch.bfloat16:
        limit += torch.finfo(torch.bfloat16).eps * ref.abs()
    return limit


def worst_share(ours, ref, limit):
    """The largest |ours - ref| / limit, and the text that says where; NaN counts as infinite."""
    if ours.numel() == 0:
        return 0.0, "empty"
    error = (ours.double() - ref).abs()
    share = torch.where(error == 0, 0.0, error / limit).nan_to_num(nan=float("inf"))
    at = int(share.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), share.shape))
    text = f"element {place}: {ours[place].item()} for {ref[place].item()}, limit {limit[place]}"
    return share.flatten()[at].item(), text


def assert_within(ours, ref, limit, what=""):
    share, text = worst_share(ours, ref, limit)
    assert share <= 1, f"{what} {text}: {share:.2f} of the limit"
