import pytest

from optimc.measure.sse import SseParser

STREAM = b': keep-alive\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata: one\ndata:two\n\ndata: \xc3\xa9\n\ndata: cut off'


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_do_not_depend_on_how_the_bytes_arrive(size):
    parser = SseParser()
    events = [e for i in range(0, len(STREAM), size) for e in parser.push(STREAM[i : i + size])]
    assert events == ['{"a": 1}', "one\ntwo", "é"]
