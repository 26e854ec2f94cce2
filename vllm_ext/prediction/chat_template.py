"""Chats read back from prompts that a chat template rendered.

A fallback for where only the final prompt is known. A template writes a mark before each message that says whose it is;
what stands between two marks is the message. Only marks that people hardly type are looked for, and at least one user's
mark must be found. Words that a user copied from another rendered chat are taken for turns: the text gets worse then,
and nothing else happens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """A mark found in a prompt, and whose words follow it."""

    role: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class _Template:
    """Marks of one family of templates."""

    name: str
    tell: str
    """What a rendered chat always contains: looked for first, as it costs little."""
    mark: re.Pattern[str]
    """Begins a message; the group ``role``, or the group of a role's name, says whose it is."""
    ends: re.Pattern[str]
    """Special tokens within or after a message, which are no words."""


_ROLES = {
    "bot": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "human": "user",
    "ipython": "tool",
    "developer": "system",
}
_SAID = r"(?P<role>system|developer|user|human|assistant|tool|ipython|model)"

_TEMPLATES = (
    _Template(  # Qwen, Yi, Hermes, SmolLM and many others
        name="ChatML",
        tell="<|im_start|>",
        mark=re.compile(rf"<\|im_start\|>\s*{_SAID}[^\S\n]*\n?"),
        ends=re.compile(r"<\|im_(?:end|start|sep)\|>|<\|endoftext\|>"),
    ),
    _Template(
        name="Llama 3",
        tell="<|start_header_id|>",
        mark=re.compile(rf"<\|start_header_id\|>\s*{_SAID}\s*<\|end_header_id\|>\s*"),
        ends=re.compile(r"<\|(?:eot_id|eom_id|begin_of_text|end_of_text|python_tag)\|>"),
    ),
    _Template(
        name="Gemma",
        tell="<start_of_turn>",
        mark=re.compile(rf"<start_of_turn>\s*{_SAID}[^\S\n]*\n?"),
        ends=re.compile(r"<end_of_turn>|<bos>|<eos>"),
    ),
    _Template(
        name="harmony (gpt-oss)",
        tell="<|start|>",
        mark=re.compile(rf"<\|start\|>\s*{_SAID}[^<]{{0,64}}(?:<\|channel\|>[^<]{{0,64}})?(?:<\|message\|>|\Z)"),
        ends=re.compile(r"<\|(?:end|return|call|start|channel|message)\|>"),
    ),
    _Template(  # Phi-3, Zephyr, Granite, GLM
        name="Phi and Zephyr",
        tell="<|user|>",
        mark=re.compile(r"<\|(?P<role>system|user|assistant|tool)\|>\s*"),
        ends=re.compile(r"<\|(?:end|endoftext)\|>|</?s>"),
    ),
    _Template(
        name="DeepSeek",
        tell="<｜User｜>",
        mark=re.compile(r"<｜(?:(?P<user>User)|(?P<assistant>Assistant)|(?P<system>begin▁of▁sentence))｜>\s*"),
        ends=re.compile(r"<｜end▁of▁sentence｜>|</?think>"),
    ),
    _Template(  # the system prompt is the text between <<SYS>> and <</SYS>> of the first question
        name="Llama 2 and Mistral",
        tell="[INST]",
        mark=re.compile(r"(?P<system><<SYS>>|\[SYSTEM_PROMPT\])|(?P<user>\[INST\]|<</SYS>>)|(?P<assistant>\[/INST\])"),
        ends=re.compile(r"</?s>|\[/SYSTEM_PROMPT\]"),
    ),
    _Template(
        name="Vicuna",
        tell="USER: ",
        mark=re.compile(r"(?:^|(?<=\s)|(?<=</s>))(?:(?P<user>USER)|(?P<assistant>ASSISTANT)):[^\S\n]*"),
        ends=re.compile(r"</?s>"),
    ),
)


def parse(prompt: str) -> list[dict[str, str]] | None:
    """Return the chat a prompt was rendered from, empty messages left out; None if no known template's marks are there.

    Words before the first mark are taken for the system prompt (Vicuna's, or Llama 2's without marks).
    """
    for template in _TEMPLATES:
        if template.tell in prompt:
            messages = _split(prompt, template)
            # Vicuna's mark is plain words: only a prompt that also waits for the assistant is a chat of its kind.
            waiting = template.name != "Vicuna" or prompt.rstrip().endswith("ASSISTANT:")
            if waiting and any(m["role"] == "user" and m["content"] for m in messages):
                return [m for m in messages if m["content"]]
    return None


def _split(prompt: str, template: _Template) -> list[dict[str, str]]:
    turns = [_turn(found) for found in template.mark.finditer(prompt)]
    if not turns:
        return []
    ends = [turn.start for turn in turns[1:]] + [len(prompt)]
    spans = [("system", 0, turns[0].start), *((t.role, t.end, end) for t, end in zip(turns, ends, strict=True))]
    return [{"role": role, "content": template.ends.sub(" ", prompt[start:end]).strip()} for role, start, end in spans]


def _turn(found: re.Match[str]) -> Turn:
    groups = {name: value for name, value in found.groupdict().items() if value}
    said = groups.get("role") or next(iter(groups))
    return Turn(_ROLES.get(said, said), found.start(), found.end())
