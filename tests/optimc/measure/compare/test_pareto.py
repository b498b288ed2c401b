from optimc.measure.compare.pareto import pareto_front


def test_front_by_hand():
    points = [
        (10, 5, 0.0),  # best quality
        (12, 2, 0.1),  # fastest decode
        (11, 5, 0.0),  # beaten by the first: same but slower
        (9, 6, 0.2),  # fastest prefill
        (12, 3, 0.2),  # beaten by the second
    ]
    assert pareto_front(points) == [True, True, False, True, False]


def test_equal_points_share_the_front():
    assert pareto_front([(1, 1), (1, 1), (1, 2)]) == [True, True, False]


def test_one_point_is_the_front_and_none_has_none():
    assert pareto_front([(3, 4)]) == [True]
    assert pareto_front([]) == []
