import pytest

from optimc.errors import LoweringError
from optimc_passes.emit.tensorrt_kernels.strip_hidden_pointers import strip_hidden_pointers

POINTER = "\t.param .u64 .ptr .global .align 1 add_param_{}"
PTX = """.version 8.0
.target sm_80
.visible .entry add(
\t.param .u64 .ptr .global .align 16 add_param_0,
\t.param .u32 add_param_1,
{},
{}
)
.reqntid 128
{{
\tld.param.b64 \t%rd1, [add_param_{}];
}}
""".format


def test_the_last_two_pointers_go_and_nothing_else():
    stripped = strip_hidden_pointers(PTX(POINTER.format(2), POINTER.format(3), 0))
    assert "add_param_1\n)" in stripped
    assert "add_param_2" not in stripped
    assert stripped.split(")")[1:] == PTX(POINTER.format(2), POINTER.format(3), 0).split(")")[1:]


def test_a_kernel_that_reads_them_is_refused():
    with pytest.raises(LoweringError, match="add reads the scratch memory .* argument 3"):
        strip_hidden_pointers(PTX(POINTER.format(2), POINTER.format(3), 3))


def test_other_arguments_in_their_place_are_refused():
    with pytest.raises(LoweringError, match=r"appended '.param .u32 add_param_3'"):
        strip_hidden_pointers(PTX(POINTER.format(2), "\t.param .u32 add_param_3", 0))


def test_text_without_an_entry_is_refused():
    with pytest.raises(LoweringError, match="no entry point"):
        strip_hidden_pointers(".version 8.0\n")
