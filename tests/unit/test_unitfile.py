"""What systemd reads back must be what was written."""

from __future__ import annotations

from ansible.module_utils.tandem.unitfile import environment_file, exec_line, exec_word


def test_plain_words_stay() -> None:
    assert exec_word("--port") == "--port"
    assert exec_word("127.0.0.1:29001") == "127.0.0.1:29001"


def test_specifiers_variables_and_blanks() -> None:
    assert exec_word("50%") == '"50%%"'
    assert exec_word("$HOME") == '"$$HOME"'
    assert exec_word('a "b"') == '"a \\"b\\""'
    assert exec_word("back\\slash") == '"back\\\\slash"'
    assert exec_word("") == '""'


def test_a_flag_a_line() -> None:
    assert exec_line(["python", "-m", "x", "--a", "1", "--b"]) == "python -m x \\\n    --a 1 \\\n    --b"


def test_environment() -> None:
    env = {"B": "two words", "A": "plain", "C": '{"k": "v"}', "D": "it's $5"}
    assert environment_file(env) == 'A=plain\nB=\'two words\'\nC=\'{"k": "v"}\'\nD="it\'s \\$5"\n'
