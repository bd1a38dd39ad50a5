"""The words of a command line. tests/systemd/test_trial.py compares them with those of a real systemd."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_probe.systemd.words import expand_variables, quote_word, split_command, split_words

# Everything that an argument can hold: no NUL, no half surrogate pair.
ARGUMENT = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)))


@given(st.lists(ARGUMENT, min_size=1))
def test_what_is_quoted_is_read_back(arguments: list[str]) -> None:
    line = " ".join(map(quote_word, arguments))
    assert "\n" not in line
    words = [word.replace("%%", "%") for word in split_command(line)]
    assert expand_variables(words, {}) == arguments


@given(ARGUMENT)
def test_no_specifier_is_written(argument: str) -> None:
    assert "%" not in quote_word(argument).replace("%%", "")


def test_plain_words_are_written_as_they_are() -> None:
    assert quote_word("--model=/models/a_b-1.0") == "--model=/models/a_b-1.0"


@pytest.mark.parametrize("word", ["a\0b", "\ud800"])
def test_what_no_argument_can_hold_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not text"):
        quote_word(word)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("""'a b' "c d" e'f 'g""", ["a b", "c d", "ef g"]),
        ("'' \"\"", ["", ""]),
        (r"a\x20b \x41\101A\U0001F600 \s\\", ["a b", "AAA😀", " \\"]),
        (r"\xc3\xa9", ["é"]),
        (r"\q \xZZ \9", [r"\q", r"\xZZ", r"\9"]),
        (r"'a\tb' \"", ["a\tb", '"']),
    ],
)
def test_quotes_and_escapes(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize("text", ['"a', "b 'c\" d"])
def test_a_quote_that_is_not_closed_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not closed"):
        split_words(text)


def test_a_semicolon_ends_a_command_only_by_itself_and_unquoted() -> None:
    assert split_command(r'a ";" \; b;c "d ; e"') == ["a", ";", ";", "b;c", "d ; e"]
    with pytest.raises(ValueError, match="second command"):
        split_command("a ; b")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("$ARGS", ["--x", "two words"]),
        ("${ARGS}", ["--x 'two words'"]),
        ("a${ONE}b", ["a1b"]),
        ("a$ONE", ["a$ONE"]),
        ("$NONE", []),
        ("${NONE}", [""]),
        ("$$ONE $${ONE}", ["$ONE ${ONE}"]),
        ("${ONE", ["${ONE"]),
    ],
)
def test_variables_are_replaced_as_systemd_does(word: str, words: list[str]) -> None:
    assert expand_variables([word], {"ARGS": "--x 'two words'", "ONE": "1"}) == words
