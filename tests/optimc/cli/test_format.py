"""Numbers and options as people read them."""

from optimc.cli.format import format_bytes, format_metrics, format_options


def test_bytes_have_binary_units():
    assert [format_bytes(count) for count in (0, 1023, 1536, 3 << 20, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 TiB",
    ]


def test_figures_are_words_and_those_of_single_layers_are_left_out():
    metrics = {
        "layers": 210,
        "bytes_before": 2048,
        "peak_bytes": 3 << 20,
        "relative_error_mean": 0.094321,
        "worst_layer": "model.layers.0.mlp.up_proj",
        "relative_error.model.layers.0.mlp.up_proj": 0.1,
    }
    assert format_metrics(metrics) == [
        "layers 210",
        "size before 2.0 KiB",
        "peak size 3.0 MiB",
        "relative error mean 0.0943",
        "worst layer model.layers.0.mlp.up_proj",
    ]


def test_options_are_written_as_in_a_recipe():
    options = {"bits": 4, "symmetric": False, "ragged": "error", "ignore": ["lm_head", "*.down_proj"], "only": ()}
    written = "bits: 4, symmetric: false, ragged: error, ignore: [lm_head, *.down_proj], only: []"
    assert format_options(options) == written
