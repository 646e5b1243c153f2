"""From conversations to token ids and loss masks, through the tokenizer's own chat template.

Training and decoding share one rendering: an answer starts where the generation prompt ends, so a drafter
is trained behind exactly the tokens it will be asked to continue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from rich.text import Text

from kvshot.data.readers import Conversation, Message
from kvshot.errors import KvshotError

_MARK = "\ue000answer\ue000"  # private-use characters: no template and hardly any text contains them


@dataclass(frozen=True)
class Example:
    """A conversation as the target reads it. ids: int64 [T]; loss_mask: bool [T], True on tokens to draft."""

    id: str
    ids: np.ndarray
    loss_mask: np.ndarray


class Encoded(NamedTuple):
    """Examples in order, and (conversation id, reason) of each conversation left out."""

    examples: list[Example]
    skipped: list[tuple[str, str]]


def prompt_ids(
    tokenizer, messages: Sequence[Message | Mapping], *, options: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of `messages` followed by the generation prompt: what decoding starts from.

    `options` are handed to the chat template (for example `{"enable_thinking": False}`); use the same ones in
    `encode`. Raises KvshotError when the tokenizer has no chat template, or the template refuses the messages
    or does not know an option.
    """
    text = prompt_text(tokenizer, messages, options=options)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def prompt_text(
    tokenizer, messages: Sequence[Message | Mapping], *, options: Mapping[str, Any] | None = None
) -> str:
    """The text that `prompt_ids` tokenises; same errors."""
    messages = [Message.model_validate(m if isinstance(m, Message) else dict(m)) for m in messages]
    if not messages:
        raise KvshotError("an empty prompt: give at least one message")
    return _Template(tokenizer, options).prompt(messages)


def encode(
    tokenizer, conversation: Conversation, *, max_length: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> Example:
    """Render the conversation once, tokenise it once, and mark what the model itself would generate.

    The mask is True on the tokens of every assistant turn: all that follows the generation prompt, and the
    end-of-turn token (not the template's newline after it). A `truncated` last answer ends without one.
    `max_length` keeps the first tokens. A token that mixes template and answer is not supervised.

    Raises KvshotError as `prompt_ids` does, and when no token is supervised, when an answer contains an end
    token, when the template changes an answer in a way that leaves no clear span, or when it renders the last
    answer as the target did not write it: not behind the generation prompt, or with an empty thought before an
    answer that was cut or that holds a thought without an end.
    """
    return _encode(_Template(tokenizer, options), conversation, max_length)


def encode_all(
    tokenizer, conversations: Iterable[Conversation], max_length: int | None = None, *,
    options: Mapping[str, Any] | None = None,
) -> Encoded:
    """`encode` for many. Conversations that give no usable example are listed in `skipped`.

    Raises KvshotError when none is left.
    """
    template = _Template(tokenizer, options)
    examples, skipped = [], []
    for conversation in conversations:
        try:
            examples.append(_encode(template, conversation, max_length))
        except KvshotError as err:
            skipped.append((conversation.id, str(err)))
    if not examples:
        why = f" (first: {skipped[0][1]})" if skipped else ""
        raise KvshotError(f"no conversation gives a supervised token{why}: check data and chat template")
    return Encoded(examples, skipped)


def preview(tokenizer, example: Example) -> Text:
    """The example as text with supervised runs in ⟦…⟧ (in colour on a terminal), under a line of counts."""
    ids, mask = example.ids, example.loss_mask
    out = Text(f"{example.id}: {int(mask.sum())} of {len(ids)} tokens supervised, in ⟦…⟧\n", style="bold")
    edges = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        run = tokenizer.decode(ids[start:stop].tolist(), clean_up_tokenization_spaces=False)
        out.append(*((f"⟦{run}⟧", "not bold green") if mask[start] else (run, "not bold dim")))
    return out


def examples_sha256(examples: Iterable[Example]) -> str:
    """Hex digest of the token ids and loss masks in order; conversation ids do not matter."""
    digest = hashlib.sha256()
    for e in examples:
        digest.update(len(e.ids).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(e.ids, dtype="<i8"))
        digest.update(np.ascontiguousarray(e.loss_mask, dtype=bool))
    return digest.hexdigest()


class _Template:
    """A tokenizer's chat template, checked, and the question where in the text the answers lie."""

    def __init__(self, tokenizer, options: Mapping[str, Any] | None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise KvshotError(
                "the tokenizer has no chat template: use an instruction-tuned target or set its chat_template"
            )
        if not tokenizer.is_fast:
            raise KvshotError("the tokenizer gives no character offsets: load its fast version")
        self.tokenizer, self.options = tokenizer, dict(options or {})
        try:
            source = tokenizer.get_chat_template()
        except ValueError as err:
            raise KvshotError("the tokenizer has several chat templates and none of them is the default one: set its "
                              "chat_template to the one for conversations") from err
        for name in self.options:  # jinja ignores what it does not know: a typo would go unnoticed
            if name not in source:
                raise KvshotError(f"the chat template knows no option {name!r}: check its spelling")
        special = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
        self.special_ids = np.array(sorted({*special, *tokenizer.all_special_ids}), dtype=np.int64)

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = False) -> str:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt, **self.options
            )
        except (TemplateError, TypeError, ValueError) as err:  # the last two: what Python says of its expressions
            why = (str(err).strip().splitlines() or [type(err).__name__])[0]
            raise KvshotError(f"the chat template refuses the turns ({why}): change or skip them") from err

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages and generation prompt; an answer's header where the template ignores the request."""
        text = self.render(messages, generation_prompt=True)
        if text == self.render(messages):
            before = self.render([*messages, Message(role="assistant", content=_MARK)]).partition(_MARK)[0]
            if before.startswith(text) and before[len(text):].strip():
                return before
        return text

    def answer(self, messages: Sequence[Message], turn: int, text: str, truncated: bool) -> tuple[int, int]:
        """Characters [start, stop) of `text` = render(messages) that the model writes in `turn`.

        A rendering with the answer replaced by a mark shows what the template puts before and after it.
        """
        mark = _MARK
        while mark in text:
            mark += _MARK
        stand_in = Message(role="assistant", content=mark)
        marked = self.render([*messages[:turn], stand_in, *messages[turn + 1:]])
        before, found, after = marked.partition(mark)
        stop = len(text) - len(after)
        prompt = self.prompt(messages[:turn]) if turn else before
        start = next((len(p) for p in (prompt, before) if text.startswith(p)), None)
        if not found or mark in after or not text.endswith(after) or start is None or start > stop:
            raise KvshotError(
                f"the chat template rewrites turn {turn + 1} so that the answer cannot be told apart: "
                "remove its thinking block, change the template options or skip the conversation"
            )
        if turn == len(messages) - 1:  # in earlier turns a template may drop what their generation prompts held
            _check_last(messages[turn].content.strip(), prompt, before, text, stop, truncated)
        return start, stop


def _check_last(said: str, prompt: str, before: str, text: str, stop: int, truncated: bool) -> None:
    """Raise KvshotError where the last answer, of the text `said`, is not rendered as the target wrote it."""
    if not text.startswith(prompt):
        raise KvshotError(f"the chat template does not put the last answer behind its generation prompt, which ends "
                          f"with {prompt[-20:]!r}: a drafter would be trained on other text than it decodes; change "
                          "the template options or use another template")
    added = before[len(prompt):].strip()  # an empty thought, where a template puts one before a plain answer
    if not added or not text.startswith(before) or text[len(prompt):stop].strip() == said:
        return
    why = "was cut" if truncated else "has a thought without an end" if said.startswith(added.split()[0]) else ""
    if why:
        raise KvshotError(f"the chat template puts {added!r} before the last answer, which {why}: the target did not "
                          "write that; mend the answer, change the template options or skip the conversation")


def _encode(template: _Template, conversation: Conversation, max_length: int | None) -> Example:
    tokenizer, messages = template.tokenizer, conversation.messages
    if not messages:
        raise KvshotError(f"conversation {conversation.id!r} has no messages: remove it")
    text = template.render(messages)
    spans = [template.answer(messages, i, text, conversation.truncated)
             for i, m in enumerate(messages) if m.role == "assistant"]
    if conversation.truncated:
        if messages[-1].role != "assistant":
            raise KvshotError(f"conversation {conversation.id!r} is truncated but has no last answer: mend")
        text = text[: spans[-1][1]]
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoding["input_ids"], dtype=np.int64)
    offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(ids), dtype=bool)
    special = np.isin(ids, template.special_ids)
    for start, stop in spans:
        if text[start:stop].strip():
            _mark(mask, ids, offsets, special, text, start, stop, tokenizer.eos_token_id, conversation.id)
    ids, mask = ids[:max_length], mask[:max_length]
    if not mask.any():
        limit = f" within the first {max_length} tokens" if max_length is not None else ""
        raise KvshotError(f"conversation {conversation.id!r} has no assistant token{limit}: leave it out")
    return Example(conversation.id, ids, mask)


def _mark(mask, ids, offsets, special, text, start: int, stop: int, eos: int | None, name: str) -> None:
    """Set `mask` on the tokens in characters [start, stop) and on the end-of-turn token behind them."""
    stops = offsets[:, 1]
    # byte-level tokenizers trim the blank off " word": a token starts where the one before it ended
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], stops[:-1]]))
    inside = (starts >= start) & (stops <= stop)
    first = end = int(np.searchsorted(stops, stop, side="right"))
    while end < len(ids) and not special[end] and not text[starts[end]:stops[end]].strip():
        end += 1  # Llama 2 puts a blank before its end token
    mask |= inside
    ends = [eos]
    if end < len(ids) and special[end]:
        mask[first:end + 1] = True
        ends.append(ids[end])
    if np.isin(ids[inside], [e for e in ends if e is not None]).any():
        raise KvshotError(f"an answer of conversation {name!r} contains an end token as text: remove it")
