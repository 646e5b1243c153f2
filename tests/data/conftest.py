"""A tiny byte-level tokenizer and chat templates in the manner of well-known families."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>",
]
CORPUS = [
    "Hello there, how are you today? I am fine and you are fine.", "user assistant model system think answer",
    "The answer is four, and the next answer is five.\n\nGood bye.\n\n\n\nGood bye, my friend.",
]

CHATML = """
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}{{ '<|im_start|>system\nYou are Tiny.<|im_end|>\n' }}{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

# keeps thinking in the last answer only; enable_thinking=False puts an empty block into the prompt
THINKING = """
{%- set at = namespace(last_user=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set at.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
  {%- set thought = '' -%}{%- set said = m.content -%}
  {%- if '</think>' in m.content -%}
    {%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
    {%- set said = m.content.split('</think>')[-1].lstrip('\n') -%}
  {%- endif -%}
  {%- if loop.index0 > at.last_user -%}
    {{- '<|im_start|>assistant\n<think>\n' + thought + '\n</think>\n\n' + said + '<|im_end|>\n' -}}
  {%- else -%}
    {{- '<|im_start|>assistant\n' + said + '<|im_end|>\n' -}}
  {%- endif -%}
{%- else -%}
  {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- endif -%}
"""

LLAMA3 = """
{{- bos_token -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + (m.content | trim) + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}
"""

GEMMA = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{- '<start_of_turn>' + role + '\n' + (m.content | trim) + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""

# no header before an answer, a blank instead, and another one before the end token
INST = """
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' -%}{{ ' ' + m.content + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}
"""

# ignores add_generation_prompt
DEAF = "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"

# newlines stay together, whatever follows, as in the tokenizers of Llama 3 and Qwen
PIECES = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"), "thinking": (THINKING, "<|im_end|>"), "llama3": (LLAMA3, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"), "inst": (INST, "</s>"), "deaf": (DEAF, "</s>"),
}


def _build(name: str, trim_offsets: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE that never loses a character, with the template `name`."""
    template, eos = TEMPLATES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    core.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token=eos, additional_special_tokens=SPECIALS,
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerFast]:
    return {name: _build(name) for name in TEMPLATES}


@pytest.fixture(scope="session")
def build() -> Callable[..., PreTrainedTokenizerFast]:
    """A fresh tokenizer that the test may change."""
    return _build
