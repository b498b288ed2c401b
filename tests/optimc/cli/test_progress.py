"""Progress where there is no terminal: lines on standard error, nothing on standard output."""

from optimc.cli.progress import progress_bar


def test_a_label_is_announced_once_and_standard_output_stays_clean(capsys):
    with progress_bar() as progress:
        for done in range(4):
            progress(done, 3, "export")
        progress(0, 1, "write [plan]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["export ...", "write [plan] ..."]


def test_long_work_says_how_long_it_took(capsys, monkeypatch):
    times = iter([10.0, 75.4])
    monkeypatch.setattr("optimc.cli.progress.time.monotonic", lambda: next(times))
    with progress_bar() as progress:
        progress(0, 2, "eval")
        progress(2, 2, "eval")
    assert capsys.readouterr().err.splitlines() == ["eval ...", "eval: done in 65 s"]
