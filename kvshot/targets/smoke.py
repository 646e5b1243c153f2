"""A tiny random Qwen3-shaped target with its own tokenizer: no download, ready in milliseconds."""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def smoke_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: ids 0..2 are the special tokens, then one id for each of the 256 bytes."""
    vocab = {token: i for i, token in enumerate((*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML,
        clean_up_tokenization_spaces=False, model_max_length=4096,
    )


def smoke_model() -> Qwen3ForCausalLM:
    """Seven layers (so that the default layers 2, 3, 4 differ), d = 64, 4 heads over 2, vocabulary 320."""
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, tie_word_embeddings=False,
        initializer_range=0.2,  # large enough that the argmax depends on the context
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        bos_token_id=None, pad_token_id=0, eos_token_id=SPECIALS.index("<|im_end|>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config)
