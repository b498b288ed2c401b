from optimc.wording import listed, one_line


def test_long_lists_are_counted_after_five_names():
    assert listed(["a"]) == "a"
    assert listed(list("abcde")) == "a, b, c, d, e"
    assert listed(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_an_error_without_words_is_named_by_its_type():
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
