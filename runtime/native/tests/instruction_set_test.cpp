#include <cstdlib>
#include <stdexcept>

#include "isa/instruction_set.h"
#include "kernels/select.h"
#include "tests/check.h"

namespace optimc::test {

namespace {

// The message of the error, or "" if there was none.
std::string refusal(const std::string& name) {
    try {
        choose_instruction_set(name);
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST("instruction_set: portable is always there, and the fastest is chosen") {
    const std::vector<InstructionSet> sets = supported_instruction_sets();
    CHECK(sets.front() == InstructionSet::portable);
    CHECK(choose_instruction_set("") == sets.back());
}

TEST("instruction_set: a supported name is obeyed, and names its kernels") {
    for (InstructionSet set : supported_instruction_sets()) {
        CHECK(choose_instruction_set(name_of(set)) == set);
        CHECK(std::string(kernels_of(set).name) == name_of(set));
        CHECK(setenv("OPTIMC_ISA", name_of(set), 1) == 0);
        CHECK(choose_instruction_set() == set);
    }
    CHECK(unsetenv("OPTIMC_ISA") == 0);
    CHECK(choose_instruction_set() == supported_instruction_sets().back());
}

TEST("instruction_set: other names are refused with the known ones") {
    CHECK(refusal("sse9").find("unknown; use portable, avx2, avx512, avx512_bf16 or amx") != std::string::npos);
    CHECK(refusal("AVX2").find("AVX2") != std::string::npos);
}

}  // namespace optimc::test
