# SPDX-License-Identifier: Apache-2.0
"""The byte-level tokenizer of the checkpoints: 256 bytes and a few special tokens; a byte is a token.

Owns the token ids. Called by ``checkpoint`` in the caller's thread.
"""

from __future__ import annotations

import json
from pathlib import Path

BYTES = 256
# The names are DeepSeek's: vLLM encodes chats for DeepseekV32ForCausalLM itself and writes these into the text.
SPECIALS = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<\uff5c\u2581pad\u2581\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<think>",
    "</think>",
)
BOS, EOS, PAD = BYTES, BYTES + 1, BYTES + 2
VOCAB = BYTES + len(SPECIALS)

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}{{ '" + SPECIALS[4] + "' + message['content'] + eos_token }}"
    "{% else %}{{ '" + SPECIALS[3] + "' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '" + SPECIALS[4] + "' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the character that byte-level tokenizers write for each byte value, by value.

    Printable bytes stand for themselves, the others are moved to 256 and above in order, as GPT-2's tokenizer does.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(0x100, 0x200))
    return [chr(value) if value in plain else chr(next(moved)) for value in range(BYTES)]


def write_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: value for value, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[1],
        "pad_token": SPECIALS[2],
        "model_max_length": 163_840,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
