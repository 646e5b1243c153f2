"""What an injection makes of the target's states."""

from __future__ import annotations

import torch

from kvshot.drafters import DrafterConfig, Given
from kvshot.drafters.injection import Injection
from kvshot.targets import load_target


def test_hidden_states_are_normed_before_they_become_keys_and_values():
    """Eq. 4; without the norm the few dimensions that are hundreds of times the others would be all that counts."""
    target = load_target("smoke", dtype="float32", device="cpu")
    config = DrafterConfig.for_target(target, draft_vocab_size=64, memory="target", kv_layers=(1, 3),
                                      injection="hidden")
    torch.manual_seed(0)
    injection, d, n = Injection(config, 0), config.hidden_size, 5
    hidden = torch.randn(1, len(config.hidden_needed), n, d)
    angle = torch.zeros(1, n, config.head_dim // 2)
    rope = angle.cos(), angle.sin()
    made = injection(Given(hidden=hidden), rope)
    places = [config.hidden_needed.index(i) for i in config.kv_layers]
    for t in range(n):
        x = torch.cat([hidden[0, i, t] / (hidden[0, i, t].square().mean() + config.norm_eps).sqrt() for i in places])
        torch.testing.assert_close(made.values[0, :, t].flatten(), injection.v_proj.weight @ x)
        torch.testing.assert_close(made.keys[0, :, t].flatten(), injection.k_proj.weight @ x)
    scaled = injection(Given(hidden=hidden * torch.tensor([300.0, 7.0])[None, :, None, None]), rope)
    torch.testing.assert_close(scaled.keys, made.keys, rtol=1e-4, atol=1e-4)
