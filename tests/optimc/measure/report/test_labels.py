"""Labels lie on nothing, and names are short where they may be."""

from itertools import combinations

from optimc.measure.report.labels import Box, Point, place_labels, short_names

FRAME = Box(0, 0, 400, 300)


def test_near_points_get_labels_that_do_not_overlap():
    points = [
        Point(200 + dx, 150 + dy, 5, f"plan-{i}") for i, (dx, dy) in enumerate([(0, 0), (4, 3), (-3, 5), (2, -4)])
    ]
    boxes = [place.box for place in place_labels(points, FRAME)]
    assert all(a.overlap(b) == 0 for a, b in combinations(boxes, 2))
    assert all(box.overlap(point.box) == 0 for box in boxes for point in points)


def test_a_label_stays_within_the_frame():
    for x, y in ((398, 2), (2, 298), (398, 298)):
        (place,) = place_labels([Point(x, y, 5, "a-plan")], FRAME)
        assert place.box.outside(FRAME) == 0


def test_a_lone_label_stands_right_of_its_mark():
    (place,) = place_labels([Point(100, 100, 5, "x")], FRAME)
    assert (place.x, place.is_far) == (109, False)


def test_names_lose_what_they_share():
    assert short_names(["smollm2-int4", "smollm2-int8-awq"]) == ["int4", "int8-awq"]
    assert short_names(["smollm2", "smollm2-int4"]) == ["smollm2", "smollm2-int4"]
    assert short_names(["one", "two"]) == ["one", "two"]
    assert short_names(["only-one"]) == ["only-one"]
    (long, _) = short_names(["x" * 40, "y"])
    assert len(long) == 24
