import numpy as np
import pytest

from optimc.errors import CalibrationError
from optimc_passes.calibrate import CalibrationSpec, evaluation_windows, load_tokens
from optimc_passes.calibrate.python_docs import evaluation_texts


def test_windows_follow_each_other_from_the_start_of_the_text(plain, plain_json):
    windows = evaluation_windows(plain_json)
    assert windows.shape == (16, 512)
    assert windows.dtype == np.int32
    ids = plain.encode("\n\n".join(evaluation_texts())).ids
    assert windows.reshape(-1).tolist() == ids[: 16 * 512]


def test_bos_opens_every_window(with_bos, with_bos_json):
    windows = evaluation_windows(with_bos_json, windows=3, length=64)
    assert windows[:, 0].tolist() == [0, 0, 0]
    ids = with_bos.encode("\n\n".join(evaluation_texts()), add_special_tokens=False).ids
    assert windows[:, 1:].reshape(-1).tolist() == ids[: 3 * 63]


def test_no_window_is_in_the_calibration_rows(plain_json):
    rows = load_tokens(CalibrationSpec(samples=500, seq_len=64, allow_fewer=True), plain_json).tokens
    windows = evaluation_windows(plain_json, windows=100, length=64)
    assert not {tuple(row.tolist()) for row in rows} & {tuple(window.tolist()) for window in windows}


def test_too_many_windows_are_refused_with_the_count(plain_json):
    with pytest.raises(CalibrationError, match=r"has \d+ windows of 512 tokens, 100000 were asked for"):
        evaluation_windows(plain_json, windows=100_000)


@pytest.mark.parametrize("length", [0, 1])
def test_windows_with_nothing_to_predict_are_refused(plain_json, length):
    with pytest.raises(CalibrationError, match="leave nothing to predict"):
        evaluation_windows(plain_json, length=length)


def test_no_tokenizer_is_refused():
    with pytest.raises(CalibrationError, match="no tokenizer"):
        evaluation_windows(None)
