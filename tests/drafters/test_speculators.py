"""EAGLE-3 unrolled here equals EAGLE-3 of the speculators package, step by step, where that package is installed."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from kvshot.data import DraftVocab
from kvshot.drafters import Drafter, DrafterConfig, Given, load_eagle3, new_drafter, save_speculators
from kvshot.targets import load_target
from kvshot.training.ttt import unroll

pytest.importorskip("speculators", reason="a foreign reference, not a dependency: pip install speculators")

K, T, V, D = 5, 12, 50, 32


def same_logits(ours: Drafter, theirs) -> None:
    """Unrolled over random text and states, as both train; their rotation is computed in float32."""
    c, generator = ours.config, torch.Generator().manual_seed(1)
    ids = torch.randint(c.target_vocab_size, (1, T + 1), generator=generator)
    hidden = torch.randn(1, len(c.hidden_layers), T + 1, c.hidden_size, generator=generator).to(ours.norm.weight.dtype)
    logits = []
    theirs.lm_head.register_forward_hook(lambda module, args, out: logits.append(out.detach()))
    with torch.no_grad():  # their token i is the one behind state i
        theirs(hidden[:, :, :T].transpose(1, 2).flatten(2), ids[:, 1:], torch.zeros(1, T, dtype=torch.int64),
               ttt_steps=K)
        columns = torch.arange(T - K)[None]
        for k, state in enumerate(unroll(ours, ids, Given(hidden), columns, K)):
            torch.testing.assert_close(ours.logits(state), logits[k][:, : T - K], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_unrolled_eagle3_equals_theirs(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals import GreedyTokenProposalConfig

    torch.manual_seed(0)
    layer = LlamaConfig(vocab_size=V, hidden_size=D, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                        num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=64)
    layer._attn_implementation = "eager"
    theirs = Eagle3DraftModel(Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=V, eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", default_proposal_method="greedy",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])))).double().eval()
    config = DrafterConfig(
        hidden_size=D, n_heads=4, n_kv_heads=2, head_dim=8, intermediate_size=48, target_vocab_size=V,
        draft_vocab_size=V, rope_theta=10000.0, norm_eps=1e-6, hidden_layers=(1, 2, 3), memory="own")
    ours = Drafter(config, torch.randn(V, D), torch.arange(V)).double().eval()
    weights = {name: torch.randn(p.shape, dtype=p.dtype) * 0.3 for name, p in ours.state_dict().items()}
    ours.load_state_dict(weights)
    missing, unknown = theirs.load_state_dict(weights | {"embed_tokens.weight": ours.embedding}, strict=False)
    assert not unknown and set(missing) <= {"verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t"}
    same_logits(ours, theirs)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("choices", [{}, {"norm_before_residual": True}, {"qk_norm": True, "depth": 2}], ids=str)
def test_they_read_what_we_export_and_draft_the_same(monkeypatch, tmp_path, choices):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    from speculators import SpeculatorModel, SpeculatorModelConfig

    target = load_target("smoke", device="cpu")
    target.model.save_pretrained(tmp_path / "verifier")
    config = DrafterConfig.for_target(target, draft_vocab_size=V, hidden_layers=(1, 2, 4), **choices)
    vocab = DraftVocab(torch.arange(0, 3 * V, 3), target.vocab_size)
    ours = new_drafter(target, config, vocab, seed=0)
    save_speculators(tmp_path / "out", ours, vocab, target, verifier=str(tmp_path / "verifier"), dtype=torch.float32)
    about = SpeculatorModelConfig.from_pretrained(tmp_path / "out")
    about.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.from_pretrained(tmp_path / "out", config=about).eval()
    assert list(theirs.target_layer_ids) == [1, 2, 4] and torch.equal(theirs.d2t, vocab.d2t)
    same_logits(ours.eval(), theirs)
    theirs.save_pretrained(tmp_path / "again")  # what they write, we read
    again, _ = load_eagle3(tmp_path / "again", target)
    assert again.config == config
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
