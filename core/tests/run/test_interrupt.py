"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from posttune.run.interrupt import InterruptFlag


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_flag_and_the_second_raises(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with InterruptFlag().installed() as flag:
        assert not flag
        os.kill(os.getpid(), number)
        assert flag
        assert flag.is_set()
        assert "stopping after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_launcher_may_repeat_its_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with InterruptFlag().installed() as flag:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with InterruptFlag().installed():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_outside_the_main_thread_it_only_carries_the_flag() -> None:
    seen: list[bool] = []

    def work() -> None:
        with InterruptFlag().installed() as flag:
            flag.set()
            seen.append(bool(flag))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]
