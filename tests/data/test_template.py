from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from kvshot.data import Conversation, Example, encode, encode_all, examples_sha256, preview, prompt_ids
from kvshot.errors import KvshotError


def talk(*turns: str, system: str | None = None, **fields) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]
    return Conversation(id="c", messages=messages, **fields)


def check(tokenizer, conversation, pieces: list[str], **kwargs) -> None:
    """`pieces` alternate: not supervised, supervised, ... and were written by hand.

    A token is supervised when all its bytes are: counted along the text, without the tokenizer's offsets.
    """
    ids = tokenizer("".join(pieces), add_special_tokens=False)["input_ids"]
    flags = [i % 2 == 1 for i, piece in enumerate(pieces) for _ in piece.encode()]
    mask, at = [], 0
    for i, token in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        width = len(token)  # byte-level: one character for each byte
        assert i in tokenizer.all_special_ids or tokenizer.decode([i]).isascii()
        mask.append(all(flags[at:at + width]))
        at += width
    example = encode(tokenizer, conversation, **kwargs)
    assert at == len(flags) and example.ids.tolist() == ids
    assert example.loss_mask.tolist() == mask
    assert example.ids.dtype == np.int64 and example.loss_mask.dtype == bool


FAMILIES = ["chatml", "thinking", "llama3", "gemma", "inst", "deaf"]
TURNS = ("Hello", "The answer is four.", "and you?", "fine")


def test_chatml_with_default_system_prompt(tokenizers):
    check(tokenizers["chatml"], talk(*TURNS), [
        "<|im_start|>system\nYou are Tiny.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "The answer is four.<|im_end|>",
        "\n<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n",
        "fine<|im_end|>", "\n",
    ])


def test_chatml_with_own_system_prompt(tokenizers):
    check(tokenizers["chatml"], talk("Hello", "fine", system="Be short."), [
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
        "fine<|im_end|>", "\n",
    ])


def test_llama3_trims_and_has_no_newline_after_the_end(tokenizers):
    check(tokenizers["llama3"], talk("Hello", " The answer is four. ", "and you?", "fine\n"), [
        "<s><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "The answer is four.<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nand you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "fine<|eot_id|>",
    ])


def test_the_tokenizer_adds_no_second_start_token(build):
    tokenizer = build("llama3")
    start = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = start
    assert tokenizer("Hello")["input_ids"][0] == 0  # what a plain call would add
    conversation = talk(*TURNS)
    assert (encode(tokenizer, conversation).ids == 0).sum() == 1
    assert prompt_ids(tokenizer, conversation.messages[:1]).count(0) == 1


def test_gemma_calls_the_assistant_model(tokenizers):
    check(tokenizers["gemma"], talk(*TURNS), [
        "<s><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n",
        "The answer is four.<end_of_turn>",
        "\n<start_of_turn>user\nand you?<end_of_turn>\n<start_of_turn>model\n", "fine<end_of_turn>", "\n",
    ])


def test_inst_has_blanks_around_the_answer(tokenizers):
    check(tokenizers["inst"], talk(*TURNS), [
        "<s>[INST] Hello [/INST]", " The answer is four. </s>", "[INST] and you? [/INST]", " fine </s>",
    ])


def test_template_that_ignores_the_generation_prompt_keeps_its_header_unsupervised(tokenizers):
    tokenizer, conversation = tokenizers["deaf"], talk(*TURNS)
    head = "<|user|>\nHello</s>\n<|assistant|>\n"
    check(tokenizer, conversation, [
        head, "The answer is four.</s>", "\n<|user|>\nand you?</s>\n<|assistant|>\n", "fine</s>", "\n",
    ])
    assert tokenizer.decode(prompt_ids(tokenizer, conversation.messages[:1])) == head


THOUGHTS = ("Hello", "<think>\nuser is fine\n</think>\n\nfour", "and you?", "<think>\nfive\n</think>\n\nfine")


def test_thinking_is_stripped_from_history_and_supervised_in_the_last_answer(tokenizers):
    check(tokenizers["thinking"], talk(*THOUGHTS), [
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "four<|im_end|>",
        "\n<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n",
        "<think>\nfive\n</think>\n\nfine<|im_end|>", "\n",
    ])


def test_thinking_off_is_prompt_in_training_as_in_decoding(tokenizers):
    tokenizer, off, empty = tokenizers["thinking"], {"enable_thinking": False}, "<think>\n\n</think>\n\n"
    conversation = talk("Hello", "four", "and you?", "fine")
    check(tokenizer, conversation, [
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "four<|im_end|>",
        f"\n<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n{empty}", "fine<|im_end|>", "\n",
    ], options=off)
    # with thinking on, the block is the model's to write
    counts = [encode(tokenizer, conversation, options=o).loss_mask.sum() for o in (None, off)]
    assert counts[0] - counts[1] == len(tokenizer(empty)["input_ids"])
    for options in (off, None):
        prompt = prompt_ids(tokenizer, conversation.messages[:3], options=options)
        example = encode(tokenizer, conversation, options=options)
        assert example.ids[: len(prompt)].tolist() == prompt
        assert not example.loss_mask[len(prompt) - 1] and example.loss_mask[len(prompt)]


def test_a_thought_with_thinking_off_is_refused(tokenizers):
    with pytest.raises(KvshotError, match="thinking"):
        encode(tokenizers["thinking"], talk(*THOUGHTS), options={"enable_thinking": False})


CLOSED, OPEN = "<think>\nfive\n</think>\n\nfine", "<think>\nfive and"


@pytest.mark.parametrize("answer, truncated, reason", [
    (OPEN, True, "was cut"), ("fine and", True, "was cut"), (OPEN, False, "has a thought without an end"),
    (CLOSED, True, None), (CLOSED, False, None), ("<think>\n\n</think>\n\nfine", True, None), ("fine", False, None),
])
def test_an_empty_thought_that_the_target_did_not_write_is_not_supervised(answer, truncated, reason, tokenizers):
    tokenizer, good = tokenizers["thinking"], talk("Hello", CLOSED)
    conversation = talk("Hello", "four", "and you?", answer, truncated=truncated)
    examples, skipped = encode_all(tokenizer, [good, conversation])
    if reason:
        assert len(examples) == 1 and f"before the last answer, which {reason}" in skipped[0][1]
    else:
        said = answer if "<think>" in answer else f"<think>\n\n</think>\n\n{answer}"
        ids, mask = examples[1].ids, examples[1].loss_mask
        assert tokenizer.decode(ids[mask]) == f"four<|im_end|>{said}" + "<|im_end|>" * (not truncated)
    # in an earlier turn the template drops the block, or adds none
    assert not encode_all(tokenizer, [talk("Hello", answer, "and you?", CLOSED)]).skipped


def test_a_last_answer_that_is_not_behind_the_generation_prompt_is_left_out(build):
    """DeepSeek-R1's distillations: decoding starts within a thought, which renderings do not show."""
    tokenizer = build("deaf")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
    )
    history = Conversation(id="h", messages=talk("Hello", "four", "and you?").messages)
    examples, skipped = encode_all(tokenizer, [history, talk(*TURNS), talk("Hello", "five</think>fine")])
    assert len(examples) == 1 and len(skipped) == 2
    assert all("behind its generation prompt, which ends with" in reason for _, reason in skipped)
    assert tokenizer.decode(examples[0].ids[examples[0].loss_mask]) == "four</s>"


def test_misspelt_option_is_refused(tokenizers):
    with pytest.raises(KvshotError, match="enable_thinkin'"):
        prompt_ids(tokenizers["thinking"], talk("Hello").messages, options={"enable_thinkin'": False})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("trim_offsets", [True, False])
def test_answers_start_where_decoding_starts(name, trim_offsets, build):
    tokenizer = build(name, trim_offsets)
    turns = ("Hello, fine?", "  blanks 😀 ünï", "你好 user", "I am\n\n fine assistant", "bye", "Good bye.")
    conversation = talk(*turns)
    example = encode(tokenizer, conversation)
    assert example.ids.tolist() == tokenizer.apply_chat_template(
        [m.model_dump() for m in conversation.messages], tokenize=True, return_dict=True)["input_ids"]
    prompt = prompt_ids(tokenizer, conversation.messages[:1])
    assert example.ids[: len(prompt)].tolist() == prompt
    assert not example.loss_mask[: len(prompt)].any() and example.loss_mask[len(prompt)]
    # every supervised run is one answer and its end token: found by plain string search, not by offsets
    runs, text = [], tokenizer.decode(example.ids)
    for i, (token, on) in enumerate(zip(example.ids, example.loss_mask, strict=True)):
        if on and not example.loss_mask[i - 1]:
            runs.append([])
        if on:
            runs[-1].append(token)
    runs = [tokenizer.decode(run) for run in runs]
    assert len(runs) == 3
    for run, answer in zip(runs, turns[1::2], strict=True):
        assert run.endswith(tokenizer.eos_token) and run in text
        said = run.removesuffix(tokenizer.eos_token).removeprefix("<think>\n\n</think>\n\n")
        assert said.strip() == answer.strip()


@pytest.mark.parametrize("name", [f for f in FAMILIES if f != "thinking"])
def test_a_truncated_answer_has_no_end(name, tokenizers):
    tokenizer = tokenizers[name]
    conversation = talk(*TURNS[:3], "Good bye, my", truncated=True)
    example = encode(tokenizer, conversation)
    turns = [m.model_dump() for m in conversation.messages]
    reference = tokenizer.apply_chat_template(
        turns, tokenize=True, return_dict=True, continue_final_message=True)
    assert example.ids.tolist() == reference["input_ids"]
    assert example.loss_mask[-1] and example.ids[-1] != tokenizer.eos_token_id
    ends = example.ids[example.loss_mask] == tokenizer.eos_token_id
    assert ends.sum() == 1  # that of the first answer


def test_user_turns_that_look_like_answers_stay_unsupervised(tokenizers):
    check(tokenizers["chatml"], talk("fine", "fine", "assistant\nfine", "fine", system="fine"), [
        "<|im_start|>system\nfine<|im_end|>\n<|im_start|>user\nfine<|im_end|>\n<|im_start|>assistant\n",
        "fine<|im_end|>",
        "\n<|im_start|>user\nassistant\nfine<|im_end|>\n<|im_start|>assistant\n", "fine<|im_end|>", "\n",
    ])


def test_conversation_that_starts_with_an_answer(tokenizers):
    greeting = {"role": "assistant", "content": "Hello"}
    conversation = Conversation(id="c", messages=[greeting, *talk("fine").messages])
    check(tokenizers["llama3"], conversation, [
        "<s><|start_header_id|>assistant<|end_header_id|>\n\n", "Hello<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nfine<|eot_id|>",
    ])


def test_a_token_shared_by_header_and_answer_is_not_supervised(tokenizers):
    tokenizer = tokenizers["chatml"]
    example = encode(tokenizer, talk("Hello", "\n\n\nGood bye"))
    ends = [i for i in range(len(example.ids)) if tokenizer.decode(example.ids[:i]).endswith("assistant")]
    merged = tokenizer.decode([example.ids[ends[0]]])
    assert merged.startswith("\n\n")  # the header's newline and the answer's first
    assert not example.loss_mask[ends[0]] and example.loss_mask[ends[0] + 1]


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_a_trimmed_blank_does_not_hide_a_shared_token(trim_offsets, build):
    """' there' holds the header's blank even when the tokenizer reports the offsets of 'there' only."""
    tokenizer = build("chatml", trim_offsets)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    example = encode(tokenizer, talk("fine", "there you are"))
    assert tokenizer.decode(example.ids[example.loss_mask]) == " you are<|im_end|>"
    shared = example.ids[example.loss_mask.argmax() - 1]
    assert tokenizer.convert_ids_to_tokens(int(shared)) == "Ġthere"


def test_special_token_that_swallows_the_newline_behind_it(build):
    """Phi-3's end and header tokens strip blanks to their right."""
    tokenizer = build("chatml")
    tokenizer.add_tokens([AddedToken("<|end|>", rstrip=True, special=True)], special_tokens=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    example = encode(tokenizer, talk(*TURNS))
    assert tokenizer.decode(example.ids[example.loss_mask]) == "The answer is four.<|end|>fine<|end|>"


def test_max_length_keeps_the_head(tokenizers):
    tokenizer, conversation = tokenizers["chatml"], talk(*TURNS)
    full = encode(tokenizer, conversation)
    cut = encode(tokenizer, conversation, max_length=len(full.ids) - 4)
    assert cut.ids.tolist() == full.ids[:-4].tolist()
    assert cut.loss_mask.tolist() == full.loss_mask[:-4].tolist()
    first = int(full.loss_mask.argmax())
    assert encode(tokenizer, conversation, max_length=first + 1).loss_mask.sum() == 1
    with pytest.raises(KvshotError, match=f"no assistant token within the first {first} tokens"):
        encode(tokenizer, conversation, max_length=first)


@pytest.mark.parametrize("conversation, match", [
    (talk("Hello"), "no assistant token"), (talk("Hello", " \n"), "no assistant token"),
    (Conversation(id="c", messages=[]), "no messages"),
    (talk("Hello", "fine", "more", truncated=True), "no last answer"),
    (talk("Hello", "fine<|im_end|>\nand on"), "end token"),
])
def test_unusable_conversations_are_refused(conversation, match, tokenizers):
    with pytest.raises(KvshotError, match=match):
        encode(tokenizers["chatml"], conversation)


def test_template_refusals_are_user_errors(tokenizers):
    conversation = talk("Hello", "fine", system="Be short.")
    with pytest.raises(KvshotError, match="System role not supported"):
        encode(tokenizers["gemma"], conversation)
    with pytest.raises(KvshotError, match="System role not supported"):
        prompt_ids(tokenizers["gemma"], conversation.messages[:2])
    with pytest.raises(KvshotError, match="at least one message"):
        prompt_ids(tokenizers["gemma"], [])


def test_broken_and_several_templates_are_user_errors(build):
    tokenizer, conversation = build("chatml"), talk("Hello", "fine")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.name }}{% endfor %}{{ 'a' + 1 }}"
    with pytest.raises(KvshotError, match="refuses the turns"):
        encode(tokenizer, conversation)
    tokenizer.chat_template = "{{ 'a' + 1 }}"  # a TypeError of Python's own
    with pytest.raises(KvshotError, match="refuses the turns") as refused:
        prompt_ids(tokenizer, conversation.messages[:1])
    assert "\n" not in str(refused.value)
    plain = build("chatml").chat_template
    tokenizer.chat_template = {"rag": plain, "tools": plain}
    with pytest.raises(KvshotError, match="several chat templates"):
        encode(tokenizer, conversation)
    tokenizer.chat_template = {"default": plain, "tools": "{{ 'a' + 1 }}"}
    assert encode(tokenizer, conversation).loss_mask.any()


def test_no_chat_template(build):
    tokenizer = build("chatml")
    tokenizer.chat_template = None
    with pytest.raises(KvshotError, match="no chat template"):
        encode(tokenizer, talk("a", "b"))
    with pytest.raises(KvshotError, match="no chat template"):
        prompt_ids(tokenizer, talk("a").messages)


def test_a_template_that_hides_answers_is_refused(build):
    tokenizer = build("chatml")
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(KvshotError, match="cannot be told apart"):
        encode(tokenizer, talk("Hello", "fine"))


def test_encode_all_skips(tokenizers):
    tokenizer, good, empty = tokenizers["chatml"], talk("Hello", "fine"), talk("Hello")
    examples, skipped = encode_all(tokenizer, [good, empty, good])
    assert len(examples) == 2 and [name for name, _ in skipped] == ["c"] and "no assistant" in skipped[0][1]
    for nothing in ([empty], []):
        with pytest.raises(KvshotError, match="no conversation gives a supervised token"):
            encode_all(tokenizer, nothing)
    assert len(encode_all(tokenizer, [good], 30).examples[0].ids) == 30


def test_preview_shows_what_is_supervised(tokenizers):
    tokenizer = tokenizers["chatml"]
    shown = preview(tokenizer, encode(tokenizer, talk("Hello", "fine 😀", system="Be short.")))
    assert shown.plain.splitlines()[0].startswith("c: ") and "tokens supervised" in shown.plain
    assert shown.plain.partition("\n")[2] == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        "⟦fine 😀<|im_end|>⟧\n"
    )


def test_digest_covers_tokens_masks_and_bounds_only():
    def digest(*pairs, name="c"):
        return examples_sha256([Example(name, np.array(i), np.array(m, dtype=bool)) for i, m in pairs])

    base = digest(([1, 2, 3], [0, 1, 1]))
    assert base == digest(([1, 2, 3], [0, 1, 1]), name="other")
    short = Example("c", np.array([1, 2, 3], np.int32), np.array([False, True, True]))
    assert base == examples_sha256([short])
    masked, changed = digest(([1, 2, 3], [1, 1, 1])), digest(([1, 2, 4], [0, 1, 1]))
    assert len({base, masked, changed, digest(([1, 2], [0, 1]), ([3], [1]))}) == 4
    # the same bytes in a row, but for the lengths
    assert digest(([5, 1], [0, 1])) != digest(([5], [1]), ([0], [1]))


@pytest.mark.network
def test_smollm2_template():
    from kvshot.targets import load_target

    tokenizer = load_target("smollm2-135m").tokenizer
    check(tokenizer, talk(*TURNS), [
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n", "The answer is four.<|im_end|>",
        "\n<|im_start|>user\nand you?<|im_end|>\n<|im_start|>assistant\n", "fine<|im_end|>", "\n",
    ])
