import pytest

from optimc.byte_size import parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7", 7),
        ("7B", 7),
        (" 2 KB ", 2000),
        ("1.5KiB", 1536),
        ("512MiB", 512 << 20),
        ("3GB", 3 * 10**9),
        ("0.5GiB", 1 << 29),
    ],
)
def test_sizes_are_exact(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "-1MiB", "1e3", "12 parsecs", "1 mib"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size; write for example 512MiB or 2GiB"):
        parse_bytes(text)
