from pydoc_data.topics import topics

from optimc_passes.calibrate.python_docs import calibration_texts, evaluation_texts


def test_splits_are_disjoint_and_complete():
    calibration, evaluation = calibration_texts(), evaluation_texts()
    assert set(calibration).isdisjoint(evaluation)
    assert sorted(calibration + evaluation) == sorted(topics.values())


def test_evaluation_is_every_fourth_topic_by_name_from_the_first():
    names = sorted(topics)
    assert evaluation_texts() == [topics[name] for name in names[::4]]
    assert len(evaluation_texts()) == (len(names) + 3) // 4
