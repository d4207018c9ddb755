import io
import os
import re
import struct
import subprocess
import sys
import threading

import pytest

from pcpbench.report.compare_view import print_compare
from pcpbench.report.console import make_console
from pcpbench.report.progress import make_progress

termios = pytest.importorskip("termios", reason="terminals are tested on POSIX systems")
fcntl = pytest.importorskip("fcntl", reason="terminals are tested on POSIX systems")

COLOUR = re.compile(r"\x1b\[[0-9;]*3[1-7]m")


@pytest.fixture
def terminal(monkeypatch):
    """A stream that is a terminal of 80 columns, and a function that gives what it was sent."""
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    sent = []

    def listen():
        try:
            while chunk := os.read(master, 65536):
                sent.append(chunk)
        except OSError:  # the other end is closed
            pass

    listener = threading.Thread(target=listen)
    listener.start()
    stream = os.fdopen(slave, "w")

    def close():
        stream.close()
        listener.join(timeout=10)
        return b"".join(sent).decode()

    yield stream, close
    if not stream.closed:
        close()
    os.close(master)


def test_a_terminal_gets_colour_and_its_own_width(make, terminal):
    stream, close = terminal
    print_compare(make.compare(make.failed()), make_console(stream))
    text = close()

    assert COLOUR.search(text)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(len(line) for line in plain.splitlines()) <= 80
    assert plain.startswith("FAIL")


def test_no_color_is_respected(make, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream, close = terminal
    print_compare(make.compare(make.failed()), make_console(stream))

    assert not COLOUR.search(close())


def test_colour_never_says_more_than_words(make):
    """Without colour the three verdicts and a drift that is not allowed still differ."""
    scenarios = (make.passed(), make.failed(), make.not_compared())
    text = make.render(print_compare, make.compare(*scenarios), 80)

    for word in ("PASS  s1", "FAIL  s3", "NOT COMPARED  s8", "NOT ALLOWED"):
        assert word in text


def test_a_stream_that_cannot_encode_a_character_does_not_end_the_report(make):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_compare(make.compare(make.passed("s\u00fc\u00df")), make_console(stream, width=80))
    stream.flush()

    assert b"PASS  s??" in raw.getvalue()


def test_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    with make_progress(stream) as progress:
        progress.start("s1", 40)
        for _ in range(40):
            progress.advance()
        progress.say("s1: pass (0.1 s)")
        progress.start("capturing", 3, "graphs")

    assert stream.getvalue() == "s1: 40 steps\ns1: pass (0.1 s)\ncapturing: 3 graphs\n"


def test_forced_colour_draws_no_bar_into_a_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    with make_progress(stream) as progress:
        progress.start("s1", 40)
        progress.advance(40)
        progress.say("s1: pass")
    assert stream.getvalue() == "s1: 40 steps\ns1: pass\n"


def test_progress_is_talk_and_goes_to_stderr(capsys):
    with make_progress() as progress:
        progress.start("s1", 40)
    out, err = capsys.readouterr()

    assert out == ""
    assert "s1" in err


def test_a_bar_on_a_terminal_that_leaves_only_what_was_said(terminal):
    stream, close = terminal
    with make_progress(stream) as progress:
        progress.start("s1", 4)
        progress.advance(4)
        progress.say("s1: pass")
        progress.start("s2", 9)
    text = close()

    assert "0/4" in text
    assert "0/9" in text
    assert "s1: pass" in text
    ending = text.rpartition("0/9")[2]
    assert "\x1b[2K" in ending  # the bar's line is wiped, and no other is begun
    assert "\n" not in ending
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l") == 1  # the cursor is back


def test_what_was_advanced_between_two_draws_is_not_lost(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    stream, close = terminal
    with make_progress(stream) as progress:
        progress.start("s1", 100)
        for _ in range(30):
            progress.advance()
        now[0] += 1.0
        progress.advance()
    text = close()

    assert "31/100" in text
    assert "1/100" not in text.replace("31/100", "")


def test_no_thread_draws_beside_the_steps_that_are_timed(terminal):
    stream, _ = terminal
    before = set(threading.enumerate())
    with make_progress(stream) as progress:
        progress.start("s1", 4)
        assert set(threading.enumerate()) == before


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream, close = terminal
    with make_progress(stream) as progress:
        progress.start("s1", 4)
    assert close().replace("\r\n", "\n") == "s1: 4 steps\n"


def test_importing_reports_brings_neither_torch_nor_pandas():
    code = (
        "import sys, pcpbench.report.compare_files, pcpbench.report.compare_view, "
        "pcpbench.report.capture_files, pcpbench.report.capture_view, pcpbench.report.doctor_view, "
        "pcpbench.report.progress; print([m for m in ('torch', 'pandas') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_no_color_prints_no_escape_at_all(make, terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream, close = terminal
    print_compare(make.compare(make.failed()), make_console(stream))
    with make_progress(stream) as progress:
        progress.start("scenario", 3)
        progress.advance()
        progress.say("done")
    text = close()
    assert "FAIL" in text
    assert "\x1b" not in text
