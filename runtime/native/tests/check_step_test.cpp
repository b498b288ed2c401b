#include "program/check_step.h"

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "tests/check.h"

namespace optimc::test {

namespace {

// A step of two sequences: three tokens of a new one, one of another that has four; blocks of four slots.
struct World {
    std::array<std::int64_t, 4> tokens = {1, 2, 9, 4};
    std::array<std::int64_t, 4> positions = {0, 1, 2, 4};
    std::array<std::int64_t, 4> slots = {0, 1, 2, 8};
    std::array<std::int32_t, 3> query_start = {0, 3, 4};
    std::array<std::int32_t, 2> context_len = {0, 4};
    std::array<std::int32_t, 4> block_table = {0, 0, 1, 2};
    std::array<std::int64_t, 2> logits_rows = {2, 3};
    std::array<std::uint8_t, 12> tree_mask = {};
    std::int64_t capacity = 4;
    std::int64_t table_width = 2;
    std::int64_t mask_width = 3;

    // The reason it is refused, or "".
    std::string refusal() const {
        const Step step = {
            .layout =
                {
                    .num_tokens = 4,
                    .num_sequences = 2,
                    .positions = positions.data(),
                    .slots = slots.data(),
                    .query_start = query_start.data(),
                    .context_len = context_len.data(),
                    .block_table = block_table.data(),
                    .table_width = table_width,
                    .tree_mask = tree_mask.data(),
                    .mask_width = mask_width,
                },
            .tokens = tokens.data(),
            .logits_rows = logits_rows.data(),
            .num_logits = 2,
        };
        try {
            check_step(step, {.capacity = capacity, .vocabulary = 10, .num_blocks = 3, .block_size = 4});
        } catch (const std::invalid_argument& error) {
            return error.what();
        }
        return "";
    }
};

// The reason a world is refused after `change`.
template <typename F>
std::string after(F change) {
    World world;
    change(world);
    return world.refusal();
}

}  // namespace

TEST("check_step: a step up to every limit is let through") { CHECK(World{}.refusal().empty()); }

TEST("check_step: indices outside are named") {
    CHECK(after([](World& w) { w.tokens[2] = 10; }) == "token id 10 is not in the vocabulary");
    CHECK(after([](World& w) { w.tokens[0] = -1; }) == "token id -1 is not in the vocabulary");
    CHECK(after([](World& w) { w.slots[3] = 12; }) == "slot 12 is not in the pool");
    CHECK(after([](World& w) { w.positions[1] = -1; }) == "a negative position");
    CHECK(after([](World& w) { w.block_table[3] = 3; }) == "block 3 is not in the pool");
    CHECK(after([](World& w) { w.block_table[0] = -1; }) == "block -1 is not in the pool");
    CHECK(after([](World& w) { w.logits_rows[1] = 4; }) == "a logits row is not in the step");
}

TEST("check_step: blocks past a sequence's end may hold anything") {
    CHECK(after([](World& w) { w.block_table[1] = -7; }).empty());
}

TEST("check_step: sequences that do not add up are refused") {
    CHECK(after([](World& w) { w.capacity = 3; }) == "4 tokens exceed the program's 3");
    CHECK(after([](World& w) { w.query_start = {0, 0, 4}; }) == "sequence 0 has no tokens");
    CHECK(after([](World& w) { w.query_start = {0, 3, 5}; }) == "query_start must go from 0 to the number of tokens");
    CHECK(after([](World& w) { w.query_start[1] = INT32_MIN; }) == "sequence 0 has no tokens");
    CHECK(after([](World& w) { w.context_len[1] = -1; }) == "sequence 1 has a context of -1");
    CHECK(after([](World& w) { w.context_len[1] = 8; }) == "block_table has too few columns for sequence 1");
    CHECK(after([](World& w) { w.context_len[1] = INT32_MAX; }) == "block_table has too few columns for sequence 1");
    CHECK(after([](World& w) { w.mask_width = 2; }) == "tree_mask has too few columns");
}

}  // namespace optimc::test
