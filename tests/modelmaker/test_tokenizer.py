# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tidal_connector.modelmaker import tokenizer


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> object:
    from transformers import PreTrainedTokenizerFast

    directory: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write_tokenizer(directory)
    return PreTrainedTokenizerFast.from_pretrained(directory)


def test_a_byte_is_a_token(loaded: object) -> None:
    assert loaded.encode("a boat\n") == list(b"a boat\n")


@pytest.mark.parametrize("text", ["plain", "tab\tand\nline", "wörter", "\x00\x7f", "灯", "  two  spaces "])
def test_text_comes_back(loaded: object, text: str) -> None:
    assert loaded.decode(loaded.encode(text)) == text


def test_each_byte_has_its_own_character() -> None:
    assert len(set(tokenizer.byte_alphabet())) == 256


def test_special_tokens_have_the_ids_of_the_config(loaded: object) -> None:
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (256, 257, 258)
    assert len(loaded) == tokenizer.VOCAB


def test_chats_have_a_template(loaded: object) -> None:
    text = loaded.apply_chat_template([{"role": "user", "content": "news"}], tokenize=False, add_generation_prompt=True)
    assert text == tokenizer.SPECIALS[0] + tokenizer.SPECIALS[3] + "news" + tokenizer.SPECIALS[4]
